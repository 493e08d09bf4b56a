// SPDX-License-Identifier: Apache-2.0

// Package plugin is the frame of every CNI plugin. It rejects bad input before anything changes, calls the verb with a validated Request,
// and turns the result or error into the document that the runtime expects, in the cniVersion of the configuration. An error document names
// the pod.
//
// A CNI plugin is a value of type Plugin, and its program only calls Main.
package plugin

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"runtime"
	"runtime/debug"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/fault"
)

// Plugin describes a CNI plugin. An operation whose function is nil succeeds without any action.
type Plugin struct {
	Name       string // the "type" in a configuration
	MinVersion string // oldest supported cniVersion; "" for 0.1.0
	Chained    bool   // ADD and CHECK require a prevResult
	// ForeignArgs is true if the plugin uses only the pod's name from CNI_ARGS. Malformed and unknown arguments are then no error, as for the
	// reference plugin with the same name.
	ForeignArgs   bool
	NoNetns       bool // the plugin does not use the namespace, so any CNI_NETNS is accepted
	DefersSignals bool // most calls change nothing: signals end the process as usual until the verb calls Request.DeferSignals

	Add    func(*Request) (*types100.Result, error) // a nil result stands for an unchanged prevResult
	Del    func(*Request) error
	Check  func(*Request) error
	GC     func(*Request) error
	Status func(*Request) error

	listen func() <-chan os.Signal // from then on signals only request the end; nil if the process is not the plugin's own
}

// Version is the version of this build, which release builds define with -ldflags -X.
var Version = ""

// memoryLimit is the memory from which on garbage is collected.
const memoryLimit = 64 << 20

// Main runs the plugin in a process that a container runtime has started, with its environment, stdin and stdout. It returns the exit
// status, 0 or 1.
func (p Plugin) Main() int {
	// The process is short-lived, so garbage collection would only slow it down. Only a verb with much to do reaches the limit.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(memoryLimit)
	// A plugin waits for the kernel, and system calls of its goroutines still run at once. With more than one processor, the Go runtime would
	// start a thread whenever a goroutine becomes ready, which costs more than the work that this thread finds.
	runtime.GOMAXPROCS(1)
	growStack()
	p.listen = listenSignals
	return p.Run(os.Getenv, os.Stdin, os.Stdout, os.Stderr)
}

// growStack grows the goroutine's stack once to the size that a CNI operation needs, instead of doubling it several times from 8 KiB with a
// copy of all frames each time.
//
//go:noinline
func growStack() byte {
	var frame [17 << 10]byte
	return frame[len(os.Args)]
}

// Run runs the plugin with the given environment and streams, and returns the exit status. It writes the whole output at the end, with one
// write.
func (p Plugin) Run(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
	verb := getenv("CNI_COMMAND")
	if verb == "" {
		fmt.Fprintf(stderr, "CNI %s plugin of Podlace %s\nCNI protocol versions supported: %s\n",
			p.Name, BuildVersion(), join(p.versions().SupportedVersions()))
		return 0
	}
	r := &Request{Plugin: p.Name, Verb: verb, CNIVersion: version.Current(), began: time.Now(), once: map[reflect.Type]any{},
		log: stderr, listen: p.listen}
	if getenv("PODLACE_LOG") == "debug" { // logs every change of the system
		r.level = slog.LevelDebug
	}
	fault.Step("start of", p.Name)
	if !p.DefersSignals {
		r.DeferSignals()
	}
	defer r.close()
	output, err := p.runVerb(r, getenv, stdin)
	if err != nil {
		output = r.errorJSON(err)
		if r.logTo != nil {
			r.logger().Error(err.Error()) // r.Plugin may name a part since r.Log was made
		}
	}
	fault.Step("end of", p.Name)
	fault.Phase("end")()
	if len(output) > 0 {
		if _, werr := stdout.Write(output); werr != nil && err == nil {
			p.undoAdd(r, &werr)
			r.logger().Error("the result could not be written to stdout", "error", werr)
			return 1
		}
	}
	if err != nil {
		return 1
	}
	return 0
}

// BuildVersion returns Version or, if that is empty, the version that the Go tool recorded in the binary.
func BuildVersion() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return "unknown"
}

func (p Plugin) versions() version.PluginInfo {
	if p.MinVersion == "" {
		return version.All
	}
	return version.VersionsStartingFrom(p.MinVersion)
}

// runVerb reads the input, runs the CNI operation and returns the output for stdout.
func (p Plugin) runVerb(r *Request, getenv func(string) string, stdin io.Reader) (out []byte, err error) {
	defer func() {
		if v := recover(); v != nil {
			fmt.Fprintf(r.log, "%v\n%s", v, debug.Stack())
			out, err = nil, Errorf(CodeInternal, "internal error: %v", v)
		}
	}()
	data, err := io.ReadAll(io.LimitReader(stdin, maxConfig+1))
	if err != nil {
		return nil, Errorf(CodeIO, "read stdin: %w", err)
	}
	switch r.Verb {
	case "VERSION":
		return p.versionJSON(data)
	case "ADD", "DEL", "CHECK", "GC", "STATUS":
	default:
		return nil, Errorf(CodeEnvironment, "CNI_COMMAND %s: want ADD, DEL, CHECK, GC, STATUS or VERSION", quote(r.Verb))
	}
	envErr, argsErr := r.readEnvironment(getenv), error(nil)
	if r.Verb == "ADD" || r.Verb == "CHECK" {
		argsErr = checkArgs(getenv("CNI_ARGS"), r.Args)
	}
	if envErr == nil && !p.ForeignArgs {
		envErr = argsErr
	}
	if err := p.readConfig(r, data, envErr); err != nil {
		return nil, err
	}
	if err := r.openLog(); err != nil {
		return nil, err
	}
	slog.SetDefault(r.Log)
	if argsErr != nil {
		r.Log.Warn("arguments are ignored", "reason", argsErr)
	}
	if !p.NoNetns && (r.Verb == "ADD" || r.Verb == "CHECK" || r.Verb == "DEL") {
		if err := r.openNetns(getenv); err != nil {
			return nil, err
		}
	}
	fault.Since("setup", r.began)
	fault.Step("verb of", p.Name)
	return p.call(r)
}

func (p Plugin) call(r *Request) ([]byte, error) {
	var verb func(*Request) error
	switch r.Verb {
	case "ADD":
		return p.runAdd(r)
	case "DEL":
		verb = p.Del
	case "CHECK":
		verb = p.Check
	case "GC":
		verb = p.GC
	case "STATUS":
		verb = p.Status
	}
	if verb == nil {
		return nil, nil
	}
	return nil, verb(r)
}

// runAdd runs ADD and encodes the result. It undoes the ADD if the configuration's CNI version cannot represent the result, or if a signal
// asked the process to end.
func (p Plugin) runAdd(r *Request) ([]byte, error) {
	result, err := p.Add(r)
	if err != nil {
		return nil, err
	}
	out, err := r.encode(result)
	if err == nil {
		err = r.interrupted()
	}
	p.undoAdd(r, &err)
	return out, err
}

// undoAdd undoes a completed ADD if *err is not nil, because the runtime then does not receive its result.
func (p Plugin) undoAdd(r *Request, err *error) {
	var undo Undo
	if p.Del != nil && r.Verb == "ADD" {
		undo.Push(func() error { return p.Del(r) })
	}
	undo.OnError(err)
}
