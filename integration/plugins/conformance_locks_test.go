// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/snapshot"
)

type blockedDEL struct {
	title string
	call  harness.Call
	free  bool // the DEL succeeds under the lock: nf_tables chains are deleted without iptables
	out   harness.Outcome
	err   error
}

// DEL ends before its time limit while a lock is held or a program does not answer. It fails with code 11 and keeps what the next DEL
// needs. All DELs wait in parallel, to save time.
func TestDelBounded(t *testing.T) {
	locked, busy := newNode(t, "locked", 130, "nftables"), newNode(t, "busy", 131, "nftables")
	_, err := exec.LookPath("iptables")
	slow := busy
	if err == nil {
		slow = newNode(t, "slow", 132, "iptables")
	}
	s, before := newStub(t), harness.Watch(t)
	var pods []attachedPod
	var dels []*blockedDEL
	del := func(n testNode, i int, plugin, by string) {
		own := n.withKeys(1, "runtimeConfig.portMappings", harness.Ports(harness.Port(8200+len(pods), 80, "tcp")))
		h := own.attach("bounded-" + string(rune('a'+len(pods))))
		c := h.callOf(i, "DEL")
		c.Plugin = plugin
		pods, dels = append(pods, h), append(dels, &blockedDEL{title: "C-54 DEL of " + plugin + ", " + by, call: c})
	}
	del(locked, 0, "bridge", "lease folder locked")
	del(locked, 0, "host-local", "lease folder locked")
	for i, plugin := range []string{"bridge", "portmap", "bandwidth"} {
		del(busy, i, plugin, "attachment locked")
	}
	if err == nil {
		for i, plugin := range []string{"bridge", "portmap"} {
			del(slow, i, plugin, "iptables locked")
			dels[len(dels)-1].free = true
		}
	} else {
		t.Log("SKIPPED part of the test: no iptables program")
	}
	s.call("ADD").Run(t).OK(t)
	s.setScript(t, "DEL", "exec sleep 100")
	dels = append(dels, &blockedDEL{title: "C-54 DEL of bridge, IPAM plugin hangs", call: s.call("DEL")})

	runLocked(t, dels, "/var/lib/cni/networks/locked/lock", "/run/podlace/busy/.lock", "/run/podlace/.iptables")
	for _, d := range dels {
		t.Run(d.title, func(t *testing.T) {
			if d.err != nil {
				t.Fatal(d.err)
			}
			if d.free {
				d.out.OK(t)
			} else {
				d.out.Refused(t, 11)
			}
		})
	}
	s.setScript(t, "DEL", "exit 0")
	s.call("DEL").Run(t).OK(t)
	for _, h := range pods {
		h.delChain()
	}
	before.Clean(t, "the next DEL")
}

func runLocked(t *testing.T, calls []*blockedDEL, locks ...string) {
	t.Helper()
	for _, path := range locks {
		defer harness.HoldLock(t, path)()
	}
	var wait sync.WaitGroup
	for _, b := range calls {
		wait.Go(func() { b.out, b.err = b.call.Start() })
	}
	wait.Wait()
}

// statusRuns is how often statusTimes runs STATUS. If it waited for a lock, even the fastest run would be slow.
const statusRuns = 5

// statusTimes runs STATUS of a plugin several times, and returns the shortest and the longest duration.
func statusTimes(t *testing.T, plugin string, conf object) (fastest, slowest time.Duration) {
	t.Helper()
	for i := range statusRuns {
		start := time.Now()
		harness.NewCall("STATUS", plugin, nil, "", conf).Run(t).OK(t)
		took := time.Since(start)
		if i == 0 {
			fastest = took
		}
		fastest, slowest = min(fastest, took), max(slowest, took)
	}
	return fastest, slowest
}

// TestStatusLooks: STATUS never waits for a lock, even if rules are missing. While the locks are held, it changes nothing; then it restores
// the rules.
func TestStatusLooks(t *testing.T) {
	harness.Program(t, "nft")
	n := newNode(t, "looks", 133, "nftables").withKeys(0, "antiSpoof", true)
	fresh := object{"name": "never", "bridge": "never0", "ipam.dataDir": "/var/lib/cni/never"}
	pod := n.attach("looks-pod")
	defer pod.delChain()
	confOf := func(plugin string) object {
		return n.confs[map[string]int{"portmap": 1, "bandwidth": 2}[plugin]]
	}
	free := map[string]time.Duration{}
	for _, plugin := range harness.AllPlugins() {
		_, free[plugin] = statusTimes(t, plugin, confOf(plugin))
	}
	// STATUS does not restore rules of networks without pods, such as those of earlier tests.
	harness.Shell(t, "nft flush ruleset")
	_, _ = statusTimes(t, "bridge", confOf("bridge"))
	nothing := &harness.Oracle{Options: snapshot.Options{Dirs: harness.StateDirs()}}
	var release []func()
	for _, path := range []string{
		"/var/lib/cni/networks/looks/lock", "/run/podlace/looks/.lock", "/run/podlace/.iptables", "/run/podlace/.hostports.lock",
		"/run/podlace/.bridges.lock",
	} {
		if _, err := os.Stat(path); err != nil && filepath.Base(path) != ".iptables" {
			t.Errorf("no plugin has taken the lock %s: %v", path, err)
		}
		release = append(release, harness.HoldLock(t, path))
	}
	harness.Shell(t, "nft flush ruleset")
	nothing.Rebase(t)
	for _, plugin := range harness.AllPlugins() {
		t.Run("C-72 STATUS of "+plugin, func(t *testing.T) {
			conf := confOf(plugin)
			if held, _ := statusTimes(t, plugin, conf); held > 10*free[plugin] {
				t.Errorf("STATUS took at least %v while locks were held, and at most %v without: it waits for a lock", held, free[plugin])
			}
			nothing.Clean(t, "STATUS while locks are held")
			for key, value := range fresh {
				conf = conf.With(key, value)
			}
			harness.NewCall("STATUS", plugin, nil, "", conf).Run(t).OK(t)
			nothing.Clean(t, "STATUS of an unused network")
		})
	}
	for _, f := range release {
		f()
	}
	for plugin, tables := range map[string][]string{"portmap": {"inet podlace_hostport"},
		"bridge": {"inet podlace_masquerade", "bridge podlace_guard"}} {
		t.Run("C-72 STATUS of "+plugin+" restores flushed rules", func(t *testing.T) {
			harness.NewCall("STATUS", plugin, nil, "", confOf(plugin)).Run(t).OK(t)
			for _, table := range tables {
				if !strings.Contains(harness.Shell(t, "nft list tables"), table+"\n") {
					t.Errorf("there is no table %s", table)
				}
			}
		})
	}
	t.Run("C-72 STATUS with an IPAM plugin that hangs", func(t *testing.T) {
		s := newStub(t)
		s.setScript(t, "STATUS", "exec sleep 100")
		if o := s.call("STATUS").Run(t).OK(t); !strings.Contains(o.Stderr, "does not answer") {
			t.Errorf("stderr does not report it: %s", o.Stderr)
		}
	})
}
