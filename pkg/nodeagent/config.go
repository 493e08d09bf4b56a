// SPDX-License-Identifier: Apache-2.0

// Package nodeagent is podlace-node: it makes the pods of all nodes of a cluster reach each other. It watches the Node objects of
// Kubernetes, keeps the node's routes to its peers, writes node.json for the plugins, and installs the plugins and their conflist. It
// writes nothing to Kubernetes and remembers nothing: one function (step) compares the kernel and the files of the node with what is
// wanted.
package nodeagent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/noderoutes"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// conflistName is the name of the conflist, beside the configuration of the agent and in the runtime's folder.
const conflistName = "10-podlace.conflist"

// config is what an administrator decides for all nodes.
type config struct {
	ClusterCIDRs []netip.Prefix
	OffLink      noderoutes.OffLink
	AddressCIDRs []netip.Prefix
	MTU          int
	VXLAN        noderoutes.VXLAN
	BinDir       string // empty: no binaries are installed
	ConfDir      string // empty: no conflist is written
	TakeOver     bool
	Adopt        []int // protocols of routes that the agent may take over
	APIServer    string

	conflist []byte // of the file beside
}

// equal reports whether nothing differs.
func (c config) equal(other config) bool { return reflect.DeepEqual(c, other) }

// defaults returns what counts where the file says nothing.
func defaults() config {
	return config{OffLink: noderoutes.OffLinkRefuse, VXLAN: noderoutes.VXLAN{VNI: 142, Port: 8472},
		BinDir: "/opt/cni/bin", ConfDir: "/etc/cni/net.d"}
}

// readConfig reads the configuration, and the conflist beside it. The error names file, line and key of all that is wrong.
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
		return c, fmt.Errorf(`read the conflist, which "confDir": "" makes unnecessary: %w`, err)
	}
	if _, err := pluginTypes(c.conflist); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// parseConfig reads the text of a configuration.
func parseConfig(file string, data []byte) (config, error) {
	c := defaults()
	o := object{file: file, data: data}
	var adopt []string
	o.read(0, "", fields{
		"clusterCIDRs": into(&c.ClusterCIDRs, checkCIDRs),
		"offLink":      into(&c.OffLink, oneOf(noderoutes.OffLinkRefuse, noderoutes.OffLinkVXLAN, noderoutes.OffLinkFabric)),
		"addressCIDRs": into(&c.AddressCIDRs, checkCIDRs),
		"mtu": into(&c.MTU, func(n int) error {
			if n == 0 {
				return nil
			}
			return between(576, 65535)(n)
		}),
		"vxlan": func(offset int, _ json.RawMessage) error {
			o.read(offset, "vxlan.", fields{
				"vni":  into(&c.VXLAN.VNI, between(1, 1<<24-1)),
				"port": into(&c.VXLAN.Port, between(1, 65535)),
			})
			return nil
		},
		"binDir":    into(&c.BinDir, checkFolder),
		"confDir":   into(&c.ConfDir, checkFolder),
		"takeOver":  into(&c.TakeOver, anything[bool]),
		"adopt":     into(&adopt, func(names []string) (err error) { c.Adopt, err = protocols(names); return err }),
		"apiServer": into(&c.APIServer, checkURL),
	})
	return c, errors.Join(o.errs...)
}

// object reads the keys of JSON objects and gathers what is wrong with them.
type object struct {
	file string
	data []byte
	errs []error
}

func (o *object) fail(offset int, key, format string, args ...any) {
	line := 1 + bytes.Count(o.data[:min(offset, len(o.data))], []byte("\n"))
	text := fmt.Sprintf(format, args...)
	if key != "" {
		text = plugin.Plain(key, 80) + ": " + text
	}
	o.errs = append(o.errs, fmt.Errorf("%s:%d: %s", o.file, line, text))
}

// fields are the keys that an object may have, with the functions that read their values, which stand at an offset.
type fields map[string]func(offset int, raw json.RawMessage) error

// read reads the object at an offset. An unknown key and a key that stands twice are errors: either may be a misspelt one.
func (o *object) read(offset int, path string, known fields) {
	dec := json.NewDecoder(bytes.NewReader(o.data[offset:]))
	at := func() int { return offset + int(dec.InputOffset()) }
	if token, err := dec.Token(); err != nil || token != json.Delim('{') {
		o.fail(at(), strings.TrimSuffix(path, "."), "want a JSON object such as {\"offLink\": \"refuse\"}")
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
			o.fail(at(), path+key, "%v", err)
			return
		}
		switch read, ok := known[key]; {
		case !ok:
			o.fail(line, path+key, "unknown key%s", suggest(key, known))
		case seen[key]:
			o.fail(line, path+key, "the key stands twice")
		default:
			if err := read(at()-len(raw), raw); err != nil {
				o.fail(line, path+key, "%v", err)
			}
		}
		seen[key] = true
	}
	if _, err := dec.Token(); err != nil {
		o.fail(at(), "", "%v", err)
	} else if path == "" && len(bytes.TrimSpace(o.data[at():])) > 0 {
		o.fail(at(), "", "text after the end of the object")
	}
}

func suggest(key string, known fields) string {
	var words []string
	for word := range known {
		words = append(words, word)
	}
	slices.Sort(words)
	if nearest := plugin.Nearest(key, words); nearest != "" {
		return "; the nearest known key is " + nearest
	}
	return "; known are " + strings.Join(words, ", ")
}

// into returns a function that reads a value and checks it.
func into[T any](to *T, check func(T) error) func(int, json.RawMessage) error {
	return func(_ int, raw json.RawMessage) error {
		var v T
		if err := json.Unmarshal(raw, &v); err != nil {
			var kind *json.UnmarshalTypeError
			if errors.As(err, &kind) {
				return fmt.Errorf("got a JSON %s, want a value such as %s", kind.Value, example(v))
			}
			return err
		}
		if err := check(v); err != nil {
			return err
		}
		*to = v
		return nil
	}
}

func example(of any) string {
	switch of.(type) {
	case bool:
		return "true"
	case int:
		return "1450"
	case []netip.Prefix:
		return `["10.244.0.0/16"]`
	case []string:
		return `["boot"]`
	}
	return `"text"`
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
		if !p.IsValid() || p != p.Masked() || p.Bits() == 0 {
			return fmt.Errorf("%s: want the first address of a CIDR, and its length, such as %s", p, p.Masked())
		}
	}
	return nil
}

// checkFolder refuses what is relative to a folder that the reader of the file does not know.
func checkFolder(path string) error {
	if path != "" && (!filepath.IsAbs(path) || path != filepath.Clean(path)) {
		return fmt.Errorf("%q: want an absolute path, or an empty text for none", plugin.Plain(path, 80))
	}
	return nil
}

func checkURL(url string) error {
	if url != "" && !strings.HasPrefix(url, "https://") && !strings.HasPrefix(url, "http://") {
		return fmt.Errorf("%q: want a URL such as https://192.0.2.1:6443", plugin.Plain(url, 80))
	}
	return nil
}

// protocols returns the numbers of routing protocols. The kernel's own routes, which come with addresses, and ours are never taken over.
func protocols(names []string) (list []int, err error) {
	known := map[string]int{"boot": 3, "static": 4} // /etc/iproute2/rt_protos
	for _, name := range names {
		n, ok := known[name]
		if !ok {
			n, err = strconv.Atoi(name)
		}
		if err != nil || n < 3 || n > 255 || n == noderoutes.Protocol {
			return nil, fmt.Errorf("%q: want boot, static, or the number of a routing protocol, 3 to 255", plugin.Plain(name, 80))
		}
		list = append(list, n)
	}
	return list, nil
}

// pluginTypes returns the types of the plugins of a conflist, each of which needs a binary.
func pluginTypes(conflist []byte) (types []string, err error) {
	var list struct {
		Name    string `json:"name"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(conflist, &list); err != nil {
		return nil, err
	}
	for _, p := range list.Plugins {
		types = append(types, p.Type)
	}
	if list.Name == "" || len(types) == 0 || slices.Contains(types, "") {
		return nil, errors.New("want a CNI configuration with a name, and plugins with a type each")
	}
	return types, nil
}
