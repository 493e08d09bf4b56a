// SPDX-License-Identifier: Apache-2.0

// Package nodeagent implements podlace-node, the agent that connects the pods of all nodes of a cluster. The agent watches the Node objects
// of Kubernetes and maintains this node's routes to the pods on other nodes. The agent also writes node.json for the plugins, and installs
// the plugins and their conflist. The agent writes nothing to Kubernetes and stores no state of its own. The function step() of the agent
// compares the kernel and the files of the node with the wanted state.
package nodeagent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// conflistName is the file name of the conflist, both in the folder of the agent's configuration and in the folder of the container
// runtime.
const conflistName = "10-podlace.conflist"

// The type config is the content of the configuration file, which is the same for all nodes. The JSON names of its fields are the keys in
// the file.
type config struct {
	ClusterCIDRs []netip.Prefix     `json:"clusterCIDRs"`
	Routes       bool               `json:"routes"` // false: another program connects the nodes, and the agent changes nothing in the kernel
	OffLink      noderoutes.OffLink `json:"offLink"`
	AddressCIDRs []netip.Prefix     `json:"addressCIDRs"`
	MTU          int                `json:"mtu"`
	VXLAN        noderoutes.VXLAN   `json:"vxlan"`
	BinDir       string             `json:"binDir"`  // empty: no binaries are installed
	ConfDir      string             `json:"confDir"` // empty: no conflist is written
	TakeOver     bool               `json:"takeOver"`
	Adopt        []int              `json:"adopt"` // protocols of routes that the agent may take over; in the file strings
	APIServer    string             `json:"apiServer"`

	conflist []byte   // from the file beside the configuration
	findings []string // keys of the conflist that do not have the effect that they suggest
}

// equal() reports whether both configurations are the same.
func (c config) equal(other config) bool { return reflect.DeepEqual(c, other) }

// These constants are the limits for numbers in the configuration.
const (
	minMTU, maxMTU = 576, 65535
	maxVNI         = 1<<24 - 1
	maxPort        = 65535
)

// offLinks returns the valid values of the configuration key offLink.
func offLinks() []noderoutes.OffLink {
	return []noderoutes.OffLink{noderoutes.OffLinkRefuse, noderoutes.OffLinkVXLAN, noderoutes.OffLinkFabric}
}

// defaults() returns the configuration with the default values of all keys.
func defaults() config {
	return config{Routes: true, OffLink: noderoutes.OffLinkRefuse, VXLAN: noderoutes.VXLAN{VNI: 142, Port: 8472},
		BinDir: "/opt/cni/bin", ConfDir: "/etc/cni/net.d"}
}

// readConfig reads the configuration file and the conflist in the same folder. If the configuration is invalid, the error of readConfig
// contains the file, line and key of each mistake.
func readConfig(file string) (c config, err error) {
	data, err := store.ReadFile(file)
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	if c, err = parseConfig(file, data); err != nil || c.ConfDir == "" {
		return c, err
	}
	path := filepath.Join(filepath.Dir(file), conflistName)
	if c.conflist, err = store.ReadFile(path); err != nil {
		return c, fmt.Errorf(`read the conflist ("confDir": "" disables it): %w`, err)
	}
	if _, err := pluginTypes(c.conflist); err != nil {
		line := 1
		if wrong := (*json.SyntaxError)(nil); errors.As(err, &wrong) {
			line = lineAt(c.conflist, int(wrong.Offset))
		}
		return c, fmt.Errorf("%s:%d: %w", path, line, err)
	}
	for _, f := range validate.Config(c.conflist, validate.Node{}) {
		c.findings = append(c.findings, plugin.Plain(path+": "+f.String(), 300))
	}
	return c, nil
}

// reload() reads the configuration again, and reports whether the agent must apply changes. reload() reports an invalid configuration as a
// problem and keeps the previous configuration.
func (a *agent) reload() (changed bool) {
	defer func() {
		for _, text := range a.config.findings {
			a.addProblem("conflist", errors.New(text), "correct "+conflistName+" in the ConfigMap or the file", false)
		}
	}()
	c, err := readConfig(a.Config)
	if err != nil {
		if a.refusal != err.Error() {
			a.log.Error("the new configuration is wrong and is ignored", "error", err)
		}
		a.refusal = err.Error()
		a.addProblem("configuration", err, "correct the ConfigMap or the file; until then the previous configuration applies", false)
		return false
	}
	a.refusal = ""
	news := !c.equal(a.inFile)
	a.inFile = c
	if news {
		a.log.Info("the configuration has changed", "file", a.Config)
	}
	if c.APIServer != a.config.APIServer || c.BinDir != a.config.BinDir || c.ConfDir != a.config.ConfDir {
		later := errors.New("apiServer, binDir and confDir take effect at the next start of podlace-node")
		if news {
			a.log.Warn(later.Error(), "file", a.Config)
		}
		a.addProblem("configuration", later, "restart podlace-node on this node", false)
		if c.ConfDir == "" { // without confDir no conflist is read
			c.conflist, c.findings = a.config.conflist, a.config.findings
		}
		c.APIServer, c.BinDir, c.ConfDir = a.config.APIServer, a.config.BinDir, a.config.ConfDir
	}
	changed = !c.equal(a.config)
	a.config = c
	return changed
}

// parseConfig parses the content of a configuration file.
func parseConfig(file string, data []byte) (config, error) {
	c := defaults()
	o := objectReader{file: file, data: data}
	var adopt []string
	o.readObject(0, "", `{"offLink": "refuse"}`, keyParsers{
		"clusterCIDRs": parseInto(&c.ClusterCIDRs, checkPodCIDRs),
		"routes":       parseInto(&c.Routes, anything[bool]),
		"offLink":      parseInto(&c.OffLink, oneOf(offLinks()...)),
		"addressCIDRs": parseInto(&c.AddressCIDRs, checkCIDRs),
		"mtu": parseInto(&c.MTU, func(n int) error {
			if n != 0 && between(minMTU, maxMTU)(n) != nil {
				return fmt.Errorf("%d: want %d to %d, or 0 for the MTU of the uplink", n, minMTU, maxMTU)
			}
			return nil
		}),
		"vxlan": func(offset int, _ json.RawMessage) error {
			o.readObject(offset, "vxlan.", `{"vni": 142, "port": 8472}`, keyParsers{
				"vni":  parseInto(&c.VXLAN.VNI, between(1, maxVNI)),
				"port": parseInto(&c.VXLAN.Port, between(1, maxPort)),
			})
			return nil
		},
		"binDir":    parseInto(&c.BinDir, checkFolder),
		"confDir":   parseInto(&c.ConfDir, checkFolder),
		"takeOver":  parseInto(&c.TakeOver, anything[bool]),
		"adopt":     parseInto(&adopt, func(names []string) (err error) { c.Adopt, err = parseProtocols(names); return err }),
		"apiServer": parseInto(&c.APIServer, checkURL),
	})
	return c, errors.Join(o.errs...)
}

// An objectReader parses JSON objects and collects the errors for their keys.
type objectReader struct {
	file string
	data []byte
	errs []error
}

func (o *objectReader) fail(offset int, key, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if key != "" {
		text = plugin.Plain(key, 80) + ": " + text
	}
	o.errs = append(o.errs, fmt.Errorf("%s:%d: %s", o.file, lineAt(o.data, offset), text))
}

// lineAt returns the number of the line that contains the byte at the given offset.
func lineAt(data []byte, offset int) int {
	return 1 + bytes.Count(data[:min(offset, len(data))], []byte("\n"))
}

// The type keyParsers maps each key of a JSON object to the function that parses the value of the key. The argument "offset" of the
// function is the position of the value in the file.
type keyParsers map[string]func(offset int, raw json.RawMessage) error

// readObject parses the JSON object at an offset. Error messages contain the argument "example", a valid object. Unknown and duplicate keys
// are errors, because they are probably spelling mistakes.
func (o *objectReader) readObject(offset int, path, example string, known keyParsers) {
	dec := json.NewDecoder(bytes.NewReader(o.data[offset:]))
	at := func() int { return offset + int(dec.InputOffset()) }
	if token, err := dec.Token(); err != nil || token != json.Delim('{') {
		o.fail(at(), strings.TrimSuffix(path, "."), "want a JSON object such as %s", example)
		return
	}
	seen := map[string]bool{}
	for dec.More() {
		token, err := dec.Token()
		key, _ := token.(string)
		line := at()
		var raw json.RawMessage
		if err == nil {
			err = dec.Decode(&raw)
		}
		if err != nil {
			o.fail(at(), path+key, "%v", explainSyntax(err))
			return
		}
		switch read, ok := known[key]; {
		case !ok:
			o.fail(line, path+key, "unknown key%s", suggest(key, known))
		case seen[key]:
			o.fail(line, path+key, "duplicate key")
		default:
			if err := read(at()-len(raw), raw); err != nil {
				o.fail(line, path+key, "%v", err)
			}
		}
		seen[key] = true
	}
	if _, err := dec.Token(); err != nil {
		o.fail(at(), "", "%v", explainSyntax(err))
	} else if path == "" && len(bytes.TrimSpace(o.data[at():])) > 0 {
		o.fail(at(), "", "text after the end of the object")
	}
}

func suggest(key string, known keyParsers) string {
	var words []string
	for word := range known {
		words = append(words, word)
	}
	slices.Sort(words)
	if nearest := plugin.Nearest(key, words); nearest != "" {
		return "; the nearest known key is " + nearest
	}
	return "; known keys: " + strings.Join(words, ", ")
}

// explainSyntax converts a syntax error of the JSON decoder to an error that users understand.
func explainSyntax(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the file ends here: a }, a ] or a quote is missing")
	}
	return fmt.Errorf("no JSON: %w; put commas between keys but not after the last, and quotes around keys and strings", err)
}

// parseInto returns a function that parses a value, checks the value, and stores the value in *to.
func parseInto[T any](to *T, check func(T) error) func(int, json.RawMessage) error {
	return func(_ int, raw json.RawMessage) error {
		var v T
		if err := json.Unmarshal(raw, &v); err != nil || string(raw) == "null" {
			return fmt.Errorf("%s: want %s", plugin.Plain(string(raw), 80), acceptedValues(check))
		}
		if err := check(v); err != nil {
			return err
		}
		*to = v
		return nil
	}
}

// acceptedValues returns a description of the values that check() accepts. If the error of check() contains a description after the word
// "want", acceptedValues returns this description.
func acceptedValues[T any](check func(T) error) string {
	var v T
	if err := check(v); err != nil {
		if _, want, ok := strings.Cut(err.Error(), "want "); ok {
			return want
		}
	}
	switch any(v).(type) {
	case bool:
		return "true or false"
	case int:
		return "a whole number without quotes"
	case []netip.Prefix:
		return `a list such as ["10.244.0.0/16"]`
	case []string:
		return `a list such as ["boot", "17"], with numbers in quotes`
	}
	return "a string in quotes"
}

func anything[T any](T) error { return nil }

func between(least, most int) func(int) error {
	return func(n int) error {
		if n < least || n > most {
			return fmt.Errorf("%d: want %d to %d", n, least, most)
		}
		return nil
	}
}

func oneOf[T ~string](words ...T) func(T) error {
	return func(word T) error {
		if !slices.Contains(words, word) {
			return fmt.Errorf("%q: want one of %q", plugin.Plain(string(word), 80), words)
		}
		return nil
	}
}

func checkCIDRs(list []netip.Prefix) error {
	for _, p := range list {
		switch {
		case !p.IsValid() || p.Addr().Is4In6():
			return fmt.Errorf("%s: want a CIDR such as 10.244.0.0/16 or fd00::/48", p)
		case p.Bits() == 0:
			return fmt.Errorf("%s covers all addresses of its family: want the CIDR of the cluster, such as 10.244.0.0/16", p)
		case p != p.Masked():
			return fmt.Errorf("%s has host bits set: want %s", p, p.Masked())
		}
	}
	return nil
}

// checkPodCIDRs returns an error for CIDRs with addresses that pods cannot have. If such a CIDR were accepted, the key useClusterCidr would
// disable masquerading for connections that need it.
func checkPodCIDRs(list []netip.Prefix) error {
	for _, p := range list {
		if r, ok := noderoutes.ForPods(p); !ok && p.IsValid() && p.Bits() > 0 {
			return fmt.Errorf("%s overlaps %s, which pods cannot use: want the CIDR of the cluster, such as 10.244.0.0/16", p, r)
		}
	}
	return checkCIDRs(list)
}

// checkFolder returns an error for a relative path, because users do not know the working directory of the agent.
func checkFolder(path string) error {
	if path != "" && (!filepath.IsAbs(path) || path != filepath.Clean(path)) {
		return fmt.Errorf("%q: want an absolute path, or an empty string for none", plugin.Plain(path, 80))
	}
	return nil
}

func checkURL(text string) error {
	u, err := url.Parse(text)
	if text != "" && (err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http") {
		return fmt.Errorf("%q: want a URL such as https://192.0.2.1:6443", plugin.Plain(text, 80))
	}
	return nil
}

// parseProtocols returns the numbers of routing protocols. parseProtocols returns an error for the protocols of the kernel and of Podlace,
// because the agent must never take over their routes.
func parseProtocols(names []string) (list []int, err error) {
	known := map[string]int{"boot": 3, "static": 4} // /etc/iproute2/rt_protos
	for _, name := range names {
		n, ok := known[name]
		if !ok {
			n, err = strconv.Atoi(name)
		}
		if err == nil && n == noderoutes.Protocol {
			return nil, fmt.Errorf("%q is the protocol of Podlace's own routes: want boot, static, or the number of another routing protocol, 3 to 255", name)
		}
		if err != nil || n < 3 || n > 255 {
			return nil, fmt.Errorf("%q: want boot, static, or the number of a routing protocol, 3 to 255", plugin.Plain(name, 80))
		}
		list = append(list, n)
	}
	return list, nil
}

// pluginTypes returns the plugin types in a conflist. Each type is the file name of a plugin binary.
func pluginTypes(conflist []byte) (types []string, err error) {
	var list struct {
		Name    string `json:"name"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(conflist, &list); err != nil {
		wrong := (*json.SyntaxError)(nil)
		if errors.As(err, &wrong) {
			return nil, fmt.Errorf("no JSON: %w", err)
		}
		return nil, errNoConflist
	}
	for _, p := range list.Plugins {
		types = append(types, p.Type)
	}
	if list.Name == "" || len(types) == 0 || slices.Contains(types, "") {
		return nil, errNoConflist
	}
	return types, nil
}

// errNoConflist is the error for an invalid conflist. errNoConflist contains an example of a valid conflist.
var errNoConflist = errors.New(`want a CNI configuration such as {"cniVersion": "1.0.0", "name": "podlace", "plugins": [{"type": "podlace-pod"}]}`)
