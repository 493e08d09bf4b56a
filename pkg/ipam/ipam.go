// SPDX-License-Identifier: Apache-2.0

// Package ipam runs the configured IPAM plugin: in this process if it is linked into the main plugin, otherwise as a program from a folder
// in CNI_PATH.
package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/child"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/plugin"
)

// timeoutOf returns the timeout of an external IPAM plugin, which could otherwise hang and hold the pod's lock forever. ADD has the
// longest, because the plugin may wait for a server. A runtime allows one minute for the DEL of the whole chain, and holds a lock during
// STATUS.
func timeoutOf(verb string) time.Duration {
	switch verb {
	case "STATUS":
		return time.Second
	case "CHECK", "DEL":
		return 12 * time.Second
	}
	return 60 * time.Second
}

// Runner runs IPAM plugins, those in Builtin inside this process.
type Runner struct{ Builtin []plugin.Plugin }

// InProcess reports whether the IPAM plugin with this name runs inside this process.
func (run Runner) InProcess(name string) bool { _, ok := run.builtin(name); return ok }

func (run Runner) builtin(name string) (plugin.Plugin, bool) {
	for _, p := range run.Builtin {
		if p.Name == plugin.Kind(name) {
			return p, true
		}
	}
	return plugin.Plugin{}, false
}

// Add allocates addresses with ADD of the IPAM plugin. If it fails, Add calls the plugin's DEL, because some may be allocated.
func (run Runner) Add(r *plugin.Request, name string) (*types100.Result, error) {
	defer fault.Phase("ipam")()
	p, ok := run.builtin(name)
	if ok {
		result, err := p.Add(under(r, name, "ADD"))
		return result, wrap(name, err)
	}
	out, err := delegate(r, name, "ADD")
	if err == nil {
		var result *types100.Result
		if result, err = parse(r, out); err == nil {
			return result, nil
		}
	}
	if e := run.Del(r, name); e != nil {
		r.Log.Warn("could not release the addresses of the failed ADD; DEL of the container tries again", "ipam", name, "error", e)
	}
	return nil, wrap(name, err)
}

func parse(r *plugin.Request, out []byte) (*types100.Result, error) {
	result, _, err := plugin.ReadResult(r.CNIVersion, out)
	if err != nil {
		return nil, plugin.Errorf(plugin.CodeDecode, "its result: %w", err)
	}
	if len(result.IPs) == 0 {
		return nil, plugin.Errorf(plugin.CodeConfig, "returned no addresses")
	}
	return result, nil
}

// Available reports whether the IPAM plugin with this name is linked in or installed.
func (run Runner) Available(r *plugin.Request, name string) bool {
	if _, ok := run.builtin(name); ok {
		return true
	}
	_, err := find(r.Path, name)
	return err == nil
}

// Del releases the attachment's addresses with DEL of the IPAM plugin.
func (run Runner) Del(r *plugin.Request, name string) error {
	return run.verb(r, name, "DEL", func(p plugin.Plugin) func(*plugin.Request) error { return p.Del })
}

// Check calls CHECK of the IPAM plugin, which fails if the attachment has lost its addresses.
func (run Runner) Check(r *plugin.Request, name string) error {
	return run.verb(r, name, "CHECK", func(p plugin.Plugin) func(*plugin.Request) error { return p.Check })
}

// GC releases the addresses of stale attachments with GC of the IPAM plugin.
func (run Runner) GC(r *plugin.Request, name string) error {
	if !run.InProcess(name) {
		if r.Dead != nil {
			r.Log.Info("GC is not passed on: the IPAM plugin would collect the attachments of running ADDs", "ipam", name)
			return nil
		}
		as := *r
		as.Config = r.ConfigForGC()
		r = &as
	}
	return run.verb(r, name, "GC", func(p plugin.Plugin) func(*plugin.Request) error { return p.GC })
}

// Status calls STATUS of the IPAM plugin, which fails if it cannot allocate addresses.
func (run Runner) Status(r *plugin.Request, name string) error {
	return run.verb(r, name, "STATUS", func(p plugin.Plugin) func(*plugin.Request) error { return p.Status })
}

func (run Runner) verb(r *plugin.Request, name, verb string, of func(plugin.Plugin) func(*plugin.Request) error) error {
	defer fault.Phase("ipam")()
	p, ok := run.builtin(name)
	if !ok {
		_, err := delegate(r, name, verb)
		return wrap(name, err)
	}
	if f := of(p); f != nil {
		return wrap(name, f(under(r, name, verb)))
	}
	return nil
}

func under(r *plugin.Request, name, verb string) *plugin.Request {
	inner := *r
	inner.Plugin, inner.Verb = plugin.Kind(name), verb
	return &inner
}

func wrap(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("ipam %s: %w", name, err)
}

// ValidType returns an error for a type that cannot be an IPAM plugin: a name with a slash, which could select a program outside the
// folders in CNI_PATH, and Podlace's other plugins, which assign no addresses.
func ValidType(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return plugin.KeyErrorf("ipam.type", "ipam type %q: want the name of a plugin in CNI_PATH", name)
	}
	if kind := plugin.Kind(name); kind != "host-local" && slices.Contains(plugin.Kinds(), kind) {
		return plugin.KeyErrorf("ipam.type", "ipam type %q: want an IPAM plugin, such as host-local", name)
	}
	return nil
}

// delegate runs an external plugin with the environment and standard input of this process (section 4 of the CNI specification).
func delegate(r *plugin.Request, name, verb string) ([]byte, error) {
	path, err := find(r.Path, name)
	if err != nil {
		return nil, err
	}
	var stdout child.Buffer
	cmd := exec.Command(path)
	cmd.Env = environment(r, verb)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(r.Config), &stdout, os.Stderr
	timeout := timeoutOf(verb)
	err = child.Run(cmd, timeout, r.LockFile)
	switch {
	case err == nil:
		return stdout.Bytes(), nil
	case errors.Is(err, child.ErrTimeout) && verb == "STATUS":
		// The plugin may just be slow, and an error would make the runtime report the node as NotReady.
		r.Log.Warn("the IPAM plugin does not answer, which STATUS tolerates; if ADD fails too, see the plugin's own log", "ipam", name, "after", timeout)
		return nil, nil
	case errors.Is(err, child.ErrTimeout):
		return nil, plugin.Errorf(plugin.CodeTryAgain, "no answer after %v", timeout)
	}
	return nil, delegateError(stdout.Bytes(), err)
}

func find(dirs []string, name string) (string, error) {
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "no such plugin in CNI_PATH %q", dirs),
		"install it there, or correct ipam.type")
}

// environment returns the environment for an external plugin, with the CNI command and attachment of the request. If GC or ADD delete
// another attachment than their own, it has no arguments and no namespace, which another interface of the container may still use.
func environment(r *plugin.Request, verb string) []string {
	own := []string{"CNI_COMMAND=" + verb}
	if r.ContainerID != "" {
		own = append(own, "CNI_CONTAINERID="+r.ContainerID, "CNI_IFNAME="+r.IfName)
		if r.ContainerID != os.Getenv("CNI_CONTAINERID") || r.IfName != os.Getenv("CNI_IFNAME") && verb == "DEL" {
			own = append(own, "CNI_NETNS=", "CNI_ARGS=")
		} else if r.IfName != os.Getenv("CNI_IFNAME") { // the arguments belong to another interface
			own = append(own, "CNI_ARGS="+arguments(r.Args))
		}
	}
	return append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.ContainsFunc(own, func(o string) bool { return strings.HasPrefix(o, name+"=") })
	}), own...)
}

// arguments formats arguments as a value of CNI_ARGS.
func arguments(args map[string]string) string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(args)) {
		pairs = append(pairs, key+"="+args[key])
	}
	return strings.Join(pairs, ";")
}

// delegateError converts the failure of an external plugin to an error, and keeps the plugin's error code.
func delegateError(stdout []byte, err error) error {
	var e struct {
		Code    uint   `json:"code"`
		Msg     string `json:"msg"`
		Details string `json:"details"`
	}
	if json.Unmarshal(stdout, &e) != nil || e.Code == 0 {
		return plugin.Errorf(plugin.CodeIO, "failed without an error document: %w", err)
	}
	text := e.Msg
	if e.Details != "" {
		text += "; " + e.Details
	}
	return plugin.Errorf(e.Code, "%w", errors.New(text))
}
