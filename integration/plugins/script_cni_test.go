// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/podlace/podlace/integration/harness"
)

// parseSettings parses the key=value words at the end of a command.
func parseSettings(ts *testscript.TestScript, words []string) map[string]string {
	m := map[string]string{}
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok {
			ts.Fatalf("%q: want key=value", w)
		}
		m[k] = v
	}
	return m
}

const cniUsage = `cni VERB PLUGIN CONF [key=value...], where the keys are
	pod=NAME      the pod, which also gives the container ID
	id=ID if=IFNAME netns=PATH args=CNI_ARGS path=CNI_PATH
	in=POD        start the plugin in the namespace of this pod
	prev=FILE     put this file into the configuration as prevResult
	out=FILE      keep stdout as it came
	CNI_...=VALUE any variable`

// cmdCNI runs one plugin, for whose output the commands "stdout", "stderr" and "cmp" then work. Fixed words replace random values.
func cmdCNI(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, len(args) >= 3, cniUsage)
	c, out := scriptCall(ts, args)
	o, err := c.Start()
	ts.Check(err)
	if out != "" {
		ts.Check(os.WriteFile(ts.MkAbs(out), []byte(o.Stdout), 0o644))
	}
	fmt.Fprint(ts.Stdout(), normaliseJSON(o.Stdout))
	fmt.Fprint(ts.Stderr(), o.Stderr)
	if o.Exit != 0 {
		err = fmt.Errorf("exit %d: %s%s", o.Exit, o.Stdout, o.Stderr)
	}
	checkExpected(ts, neg, err, "cni %s", strings.Join(args, " "))
}

func scriptCall(ts *testscript.TestScript, args []string) (harness.Call, string) {
	s, set := scriptOf(ts), parseSettings(ts, args[3:])
	c := harness.NewCall(args[0], args[1], s.pods[set["pod"]], set["pod"], nil).With("CNI_ARGS", "")
	if args[2] != "-" {
		c.Stdin = []byte(ts.ReadFile(args[2]))
	}
	out := ""
	for key, value := range set {
		switch key {
		case "pod":
			s.findPod(ts, value)
		case "id", "if", "netns", "args", "path":
			names := map[string]string{"id": "CONTAINERID", "if": "IFNAME", "netns": "NETNS", "args": "ARGS", "path": "PATH"}
			c.Env["CNI_"+names[key]] = value
		case "in":
			c.In = s.findPod(ts, value)
		case "prev":
			c.Stdin = withPrev(ts, c.Stdin, ts.ReadFile(value))
		case "out":
			out = value
		default:
			if !strings.HasPrefix(key, "CNI_") {
				ts.Fatalf("unknown key %q; usage: %s", key, cniUsage)
			}
			c.Env[key] = value
		}
	}
	return c, out
}

func withPrev(ts *testscript.TestScript, conf []byte, prev string) []byte {
	var o object
	ts.Check(json.Unmarshal(conf, &o))
	o["prevResult"] = json.RawMessage(prev)
	return harness.Encode(o)
}

const chainUsage = `chain ADD|DEL|CHECK CONFLIST POD [key=value...], chain GC|STATUS CONFLIST [key=value...], where the keys are
	id=ID if=IFNAME netns=PATH
	args=K=V;K=V
	caps=FILE       JSON object of capability arguments, as portMappings
	valid=ID/IFNAME,...  attachments that GC keeps`

// cmdChain runs the plugins of a conflist through libcni, as a runtime does.
func cmdChain(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, len(args) >= 2, chainUsage)
	verb, rest := args[0], args[2:]
	rt := &libcni.RuntimeConf{IfName: "eth0"}
	if verb != "GC" && verb != "STATUS" {
		checkUsage(ts, len(rest) > 0, chainUsage)
		rt.ContainerID, rt.NetNS = rest[0], scriptOf(ts).findPod(ts, rest[0]).Path
		rest = rest[1:]
	}
	set := parseSettings(ts, rest)
	runtimeConf(ts, rt, set)
	n, err := harness.OpenNetwork([]byte(ts.ReadFile(args[1])), scriptOf(ts).cacheDir, nil)
	ts.Check(err)
	result, err := n.Do(verb, rt, validList(set["valid"]))
	if result != nil {
		fmt.Fprint(ts.Stdout(), normaliseJSON(string(harness.Encode(result))))
	}
	fmt.Fprint(ts.Stderr(), n.Stderr.String())
	if err != nil {
		fmt.Fprintln(ts.Stderr(), err)
	}
	checkExpected(ts, neg, err, "chain %s", strings.Join(args, " "))
}

func runtimeConf(ts *testscript.TestScript, rt *libcni.RuntimeConf, set map[string]string) {
	for key, value := range set {
		switch key {
		case "id":
			rt.ContainerID = value
		case "if":
			rt.IfName = value
		case "netns":
			rt.NetNS = value
		case "args":
			for _, pair := range strings.Split(value, ";") {
				k, v, _ := strings.Cut(pair, "=")
				rt.Args = append(rt.Args, [2]string{k, v})
			}
		case "caps":
			ts.Check(json.Unmarshal([]byte(ts.ReadFile(value)), &rt.CapabilityArgs))
		case "valid":
		default:
			ts.Fatalf("unknown key %q; usage: %s", key, chainUsage)
		}
	}
}

func validList(s string) []types.GCAttachment {
	var list []types.GCAttachment
	for _, w := range strings.Split(s, ",") {
		if id, ifname, ok := strings.Cut(w, "/"); ok {
			list = append(list, types.GCAttachment{ContainerID: id, IfName: ifname})
		}
	}
	return list
}

// normaliseJSON sorts the keys of a JSON document and replaces random MAC addresses and names of host-side interfaces.
func normaliseJSON(text string) string {
	var v any
	if json.Unmarshal([]byte(text), &v) != nil {
		return text
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if e.Encode(v) != nil {
		return text
	}
	out := regexp.MustCompile(`"([0-9a-f]{2}:){5}[0-9a-f]{2}"`).ReplaceAllStringFunc(b.String(), func(mac string) string {
		if mac == `"00:00:00:00:00:00"` {
			return mac
		}
		return `"MAC"`
	})
	return regexp.MustCompile(`\b(veth|bwp)[0-9a-f]{8,12}\b`).ReplaceAllString(out, "${1}X")
}
