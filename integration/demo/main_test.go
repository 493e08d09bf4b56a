// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// The test binary is also a fake plugin, to which links with the plugins' names lead, and with -json the demo on one plugin folder.
func TestMain(m *testing.M) {
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(playPlugin(filepath.Base(os.Args[0])))
	}
	if slices.Contains(os.Args, "-json") {
		os.Exit(playDemo(os.Args[1:]))
	}
	inside, code, err := sandbox.Enter()
	switch {
	case err != nil && os.Getenv("KERNELTEST") == "require":
		fmt.Fprintln(os.Stderr, "no sandbox:", err)
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "SKIP integration/demo: no sandbox:", err)
		os.Exit(0)
	case !inside:
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// failsWith returns the environment variable that makes ADD of a fake plugin fail while it has a capability left. Its value is the CNI
// error.
func failsWith(plugin string) string { return "PLAY_" + plugin }

// takesTime returns the environment variable with the duration of each call of a fake plugin.
func takesTime(plugin string) string { return "PLAY_SLOWLY_" + plugin }

func playPlugin(name string) int {
	if pause, err := time.ParseDuration(os.Getenv(takesTime(name))); err == nil {
		time.Sleep(pause)
	}
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
		Can        map[string]bool `json:"capabilities"`
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil || json.Unmarshal(stdin, &conf) != nil {
		return 2
	}
	switch e := os.Getenv(failsWith(name)); {
	case os.Getenv("CNI_COMMAND") != "ADD":
	case e != "" && (name == "bridge" || len(conf.Can) > 0):
		fmt.Print(e)
		return 1
	case conf.PrevResult != nil:
		fmt.Print(string(conf.PrevResult))
	default:
		fmt.Print(`{"cniVersion":"1.0.0","ips":[{"address":"10.58.0.9/16"},{"address":"fd00:58::9/64"}]}`)
	}
	return 0
}

// playedPlugins creates a folder of fake plugins, which succeed and change nothing unless told otherwise.
func playedPlugins(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GORACE", "atexit_sleep_ms=0") // otherwise each played plugin would wait a second
	dir := t.TempDir()
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap", "bandwidth"} {
		if err := os.Symlink(exe, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func shipped(t *testing.T) []byte {
	t.Helper()
	conflist, err := conf.Conflist(conf.Default)
	if err != nil {
		t.Fatal(err)
	}
	return conflist
}

// playedLab returns a lab with pods and a chain, but without client and servers.
func playedLab(t *testing.T) *lab {
	t.Helper()
	c, err := newRunner(playedPlugins(t), t.TempDir(), shipped(t))
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{chain: c, lacks: map[string]string{}, flows: map[string]measuredFlow{}}
	t.Cleanup(l.close)
	for name, p := range map[string]**pod{"pod-a": &l.a, "warm-up": &l.warm, "bad": &l.bad} {
		if *p, err = l.newPod(name); err != nil {
			t.Fatal(err)
		}
	}
	l.client = l.a.Pod
	return l
}
