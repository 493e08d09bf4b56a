// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// withName returns another pod with the given name on the same node.
func (l testLab) withName(name string) (testLab, string) {
	l.Pod = kerneltest.NewPod(l.T)
	return l, "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + name
}

// ADD refuses a port of a live pod and names this pod, its container and its age (F-39). Another protocol or hostIP is no conflict
// (Kubernetes conformance: "HostPort validates that there is no conflict between pods with same hostPort but different hostIP and
// protocol").
func TestClash(t *testing.T) {
	eachBackend(t, func(l testLab) {
		t, backend := l.T, l.Conf["backend"].(string)
		ask := func(ports ...any) []any {
			return []any{"runtimeConfig", object{"portMappings": ports}, "prevResult", prevResult("10.71.0.6/24")}
		}
		l.OK(l.Call("ADD", "a"))
		for _, other := range []string{"nftables", "iptables"} {
			b, args := l.withName("b")
			b.Conf = b.Conf.With("backend", other)
			o := b.Call("ADD", "b", append(ask(port(8080, 80, "tcp"), port(9999, 80, "tcp")), "CNI_ARGS", args)...)
			for _, says := range []string{"hostPort tcp 8080 is in use by shop/a, container a, since 20"} {
				if o.Failure.Code != plugin.CodePortConflict || !strings.Contains(o.Failure.Msg, says) {
					t.Errorf("%s after %s: %s", other, backend, o.Stdout)
				}
			}
			b.OK(b.Call("ADD", "c", append(ask(port(8080, 80, "udp"), port(9999, 80, "tcp"),
				object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "10.71.0.1"}), "CNI_ARGS", args)...))
			b.OK(b.Call("DEL", "c"))
		}
		l.OK(l.Call("CHECK", "a"))
		l.OK(l.Call("DEL", "a"))
		if left, _, err := attachment.Scan(); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
	})
}

// A new pod gets the port of a dead pod, and that of an older pod of the same name (F-39). CHECK of the older pod then names the new owner;
// its other ports stay until its own DEL.
func TestTakeOver(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		for _, backend := range []string{"nftables", "iptables"} {
			for what, ports := range map[string][]any{"same": {port(8080, 80, "tcp")}, "range": sequence(8080, 20)} {
				l.Run(what+" "+backend, func(t *testing.T) {
					l := l
					l.T = t
					l.takeOver(backend, asking("10.71.0.6/24", ports...))
				})
			}
		}
	})
}

func (l testLab) takeOver(backend string, ask []any) {
	old, args := l.withName("web-0")
	old.OK(old.Call("ADD", "old", "CNI_ARGS", args))
	next, _ := l.withName("web-0")
	next.Conf = next.Conf.With("backend", backend)
	next.OK(next.Call("ADD", "next", append(ask, "CNI_ARGS", args)...))
	next.OK(next.Call("CHECK", "next", ask...))
	l.Fails(old.Call("CHECK", "old"), plugin.CodeStateDiffers, ": now belongs to shop/web-0, container next, since 20")
	old.OK(old.Call("DEL", "old"))
	next.OK(next.Call("CHECK", "next", ask...))

	if err := next.Pod.Close(); err != nil {
		l.Fatal(err)
	}
	other, args := l.withName("other")
	other.OK(other.Call("ADD", "other", append(ask, "CNI_ARGS", args)...))
	other.OK(other.Call("CHECK", "other", ask...))
	next.OK(next.Call("DEL", "next", "CNI_NETNS", ""))
	other.OK(other.Call("CHECK", "other", ask...))
	other.OK(other.Call("DEL", "other"))
}

// A dead pod loses all its ports, so the next pod can have its address and an overlapping range.
func TestDeadRange(t *testing.T) {
	l := newLab(t)
	ports := func(first int) (list []any) {
		for i := range 32 {
			list = append(list, port(first+i, first+i, "udp"))
		}
		return list
	}
	ask := func(first int) []any {
		return []any{"runtimeConfig", object{"portMappings": ports(first)}, "prevResult", prevResult("10.71.0.6/24")}
	}
	old, _ := l.withName("old")
	old.OK(old.Call("ADD", "old", ask(2000)...))
	if err := old.Pod.Close(); err != nil {
		t.Fatal(err)
	}
	next, _ := l.withName("next")
	next.OK(next.Call("ADD", "next", ask(2016)...))
	next.OK(next.Call("CHECK", "next", ask(2016)...))
	next.OK(next.Call("DEL", "old", "CNI_NETNS", ""))
	next.OK(next.Call("CHECK", "next", ask(2016)...))
	next.OK(next.Call("DEL", "next"))
}

// Without a record, a live pod keeps its ports, while those of a dead pod go at the next GC or when another pod requests them.
func TestLostOwner(t *testing.T) {
	l := newLab(t)
	conflict := func(o outcome) {
		t.Helper()
		if o.Failure.Code != plugin.CodePortConflict || !strings.Contains(o.Failure.Details, "its record is lost") {
			t.Errorf("got %s", o.Stdout)
		}
	}
	lose := func() {
		t.Helper()
		left, _, err := attachment.Scan()
		for _, rec := range left {
			err = errors.Join(err, os.Remove(rec.Path()))
		}
		if err != nil || len(left) != 1 {
			t.Fatal(left, err)
		}
	}
	gc := func() { l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{})) }
	ask := []any{"runtimeConfig", object{"portMappings": []any{port(8080, 80, "tcp"), port(8081, 80, "tcp")}}, "prevResult",
		prevResult("10.71.0.6/24")}
	for _, collect := range []bool{false, true} {
		lost, _ := l.withName("lost")
		lost.OK(lost.Call("ADD", "lost"))
		lose()
		gc()
		next, _ := l.withName("next")
		conflict(next.Call("ADD", "next", ask...))
		if err := lost.Pod.Close(); err != nil {
			t.Fatal(err)
		}
		if collect {
			gc()
			if left := strings.Join(podElements(t), "\n"); strings.Contains(left, " owners ") || strings.Contains(left, " ports4 ") {
				t.Errorf("left %s", left)
			}
		}
		next.OK(next.Call("ADD", "next", ask...))
		next.OK(next.Call("CHECK", "next", ask...))
		next.OK(next.Call("DEL", "next"))
		gc()
	}
}

// CHECK fails after a flush; STATUS and ADD restore all rules and succeed (F-21).
func TestFlush(t *testing.T) {
	kerneltest.Slow(t)
	for what, flush := range map[string]func(t *testing.T, backend string){
		"ruleset": func(t *testing.T, _ string) {
			if err := kerneltest.FlushNFT(); err != nil {
				t.Fatal(err)
			}
		},
		"own rules": func(t *testing.T, backend string) {
			commands := []string{"nft flush table inet podlace_hostport"}
			if backend == "iptables" {
				commands = []string{"iptables -t nat -F", "ip6tables -t nat -F"}
			}
			for _, command := range commands {
				words := strings.Fields(command)
				if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
					t.Fatalf("%s: %v %s", command, err, out)
				}
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			eachBackend(t, func(l testLab) {
				t, backend := l.T, l.Conf["backend"].(string)
				second, _ := l.withName("second")
				ask := []any{"runtimeConfig", object{"portMappings": []any{port(9090, 90, "tcp")}}, "prevResult", prevResult("10.71.0.6/24")}
				third := []any{"runtimeConfig", object{"portMappings": []any{port(9091, 90, "tcp")}}, "prevResult", prevResult("10.71.0.7/24")}
				l.OK(l.Call("ADD", "a"))
				second.OK(second.Call("ADD", "b", ask...))
				for _, mend := range []func(){
					func() { l.OK(l.Call("STATUS", "")) },
					func() { l.OK(l.Call("ADD", "c", third...)); l.OK(l.Call("DEL", "c", third...)) },
				} {
					flush(t, backend)
					for range 2 {
						if o := l.Call("CHECK", "a"); o.Failure.Code != plugin.CodeStateDiffers {
							t.Errorf("CHECK after the flush: %s", o.Stdout)
						}
					}
					mend()
					l.OK(l.Call("CHECK", "a"))
					second.OK(second.Call("CHECK", "b", ask...))
				}
				l.OK(l.Call("DEL", "a"))
				second.OK(second.Call("DEL", "b"))
			})
		})
	}
}

// If iptables refuses the rules of one pod after a flush, the others are restored and a new pod gets its ports (F-21).
func TestBadNeighbour(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	bad, _ := l.withName("bad")
	bad.Conf = bad.Conf.With("conditionsV4", []string{"-m", "mark", "--mark", "0x1"})
	bad.OK(bad.Call("ADD", "bad"))
	runAdmin(t, `sed -i 's/"0x1"/"0xzz"/' `+l.recordFile("bad")) // such as a host name that no longer resolves
	for _, backend := range []string{"nftables", "iptables"} {
		if err := kerneltest.FlushNFT(); err != nil {
			t.Fatal(err)
		}
		next, _ := l.withName("next")
		next.Conf = next.Conf.With("backend", backend)
		ask := asking("10.71.0.6/24", port(9090, 80, "tcp"))
		next.OK(next.Call("ADD", "next", ask...))
		next.OK(next.Call("CHECK", "next", ask...))
		next.OK(next.Call("DEL", "next"))
	}
	bad.OK(bad.Call("DEL", "bad"))
}

// If iptables rejects the conditions, ADD returns a configuration error and leaves no state (S-10).
func TestBadConditions(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	l.Fails(l.Call("ADD", "a", "conditionsV4", []string{"-m", "mark", "--mark", "0xzz"}), plugin.CodeConfig,
		`conditionsV4 ["-m" "mark" "--mark" "0xzz"]: iptables-restore`)
	if l.isMapped("a") {
		t.Error("something is left")
	}
	l.Fails(l.Call("ADD", "a", "backend", "iptables", "externalSetMarkChain", "NONE"), plugin.CodeConfig, "no such chain")
}

// With a lost or unreadable record, DEL knows only the attachment's key, but removes all its state.
func TestLostRecord(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		t := l.T
		l.OK(l.Call("ADD", "warm"))
		l.OK(l.Call("DEL", "warm"))
		kerneltest.Clean(t)
		path := l.recordFile("a")
		for what, lose := range map[string]func() error{
			"gone": func() error { return os.Remove(path) }, "torn": func() error { return os.Truncate(path, 20) },
			"empty": func() error { return os.Truncate(path, 0) },
		} {
			l.OK(l.Call("ADD", "a"))
			if err := lose(); err != nil {
				t.Fatal(what, err)
			}
			l.OK(l.Call("DEL", "a", "prevResult", nil, "runtimeConfig", nil))
			if left := podElements(t); len(left) > 1 || l.isMapped("a") { // the schema mark stays
				t.Errorf("%s: left %q", what, left)
			}
			l.OK(l.Call("ADD", "a"))
			if err := lose(); err != nil {
				t.Fatal(what, err)
			}
			l.OK(l.Call("ADD", "a", "runtimeConfig", object{"portMappings": []any{port(9090, 80, "tcp")}}))
			l.OK(l.Call("DEL", "a"))
			if left := podElements(t); len(left) > 1 || l.isMapped("a") {
				t.Errorf("%s, ADD with other ports: left %q", what, left)
			}
		}
	})
}

func sequence(first, n int) (list []any) {
	for i := range n {
		list = append(list, port(first+i, first+i, "tcp"))
	}
	return list
}

func asking(address string, ports ...any) []any {
	return []any{"runtimeConfig", object{"portMappings": ports}, "prevResult", prevResult(address)}
}

// Restore does not give a port back to the pod that lost it, whatever the backends, and two records with the same port do not stop the
// ports of other pods.
func TestRestoreAfterTakeOver(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		for _, other := range []string{"nftables", "iptables"} {
			for what, loser := range map[string][]any{"one": asking("10.71.0.6/24", port(8095, 80, "tcp")),
				"range": asking("10.71.0.6/24", sequence(8080, 20)...)} {
				old, args := l.withName("old")
				old.OK(old.Call("ADD", "old", append(loser, "CNI_ARGS", args)...))
				third, _ := l.withName("third")
				third.OK(third.Call("ADD", "third", asking("10.71.0.8/24", port(9000, 80, "tcp"))...))
				if err := old.Pod.Close(); err != nil {
					l.Fatal(err)
				}
				next, args := l.withName("next")
				next.Conf = next.Conf.With("backend", other)
				now := asking("10.71.0.7/24", sequence(8090, 20)...)
				next.OK(next.Call("ADD", "next", append(now, "CNI_ARGS", args)...))
				for _, flush := range []func() error{func() error { return nil }, kerneltest.FlushNFT} {
					if err := errors.Join(flush(), Restore(openHost(l.T), slog.Default())); err != nil {
						l.Errorf("%s, %s: %v", what, other, err)
					}
					next.OK(next.Call("CHECK", "next", now...))
					third.OK(third.Call("CHECK", "third", asking("10.71.0.8/24", port(9000, 80, "tcp"))...))
				}
				for id, at := range map[string]testLab{"old": old, "third": third, "next": next} {
					at.OK(at.Call("DEL", id, "CNI_NETNS", ""))
				}
			}
		}
	})
}

// If a container requests the same ports in two networks, with one or two backends, the first attachment keeps them and CHECK passes in
// both.
func TestSharedPort(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		for _, other := range []string{"nftables", "iptables"} {
			for _, ports := range [][]any{{port(8080, 80, "tcp")}, sequence(8080, 20)} {
				first, second := asking("10.71.0.5/24", ports...), append(asking("10.71.0.9/24", ports...), "name", "other", "backend", other)
				l.OK(l.Call("ADD", "a", first...))
				l.OK(l.Call("ADD", "a", second...))
				l.OK(l.Call("CHECK", "a", first...))
				l.OK(l.Call("CHECK", "a", second...))
				l.OK(l.Call("DEL", "a", second...))
				l.OK(l.Call("CHECK", "a", first...))
				l.OK(l.Call("DEL", "a"))
			}
		}
	})
}

// CHECK fails without the rules that protect the node's loopback; STATUS restores them (S-04).
func TestLostProtection(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	if out, err := exec.Command("nft", "delete", "table", "inet", "podlace_loopback").CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "podlace_loopback are missing")
	l.OK(l.Call("STATUS", ""))
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("DEL", "a"))
}

// If only the masquerade chains are flushed, CHECK fails and Restore refills them.
func TestFlushedChains(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		commands := []string{"nft flush map inet podlace_hostport ports4", "nft flush set inet podlace_hostport snat6"}
		if l.Conf["backend"] == "iptables" {
			commands = []string{"iptables -t nat -F POSTROUTING", "iptables -t nat -F " + masqChain, "ip6tables -t nat -F " + markChain,
				"iptables -t nat -F " + dnatChain}
		}
		l.OK(l.Call("ADD", "a"))
		for _, command := range commands {
			words := strings.Fields(command)
			if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
				l.Fatalf("%s: %v %s", command, err, out)
			}
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
			if err := Restore(openHost(l.T), slog.Default()); err != nil {
				l.Errorf("%s: %v", command, err)
			}
			l.OK(l.Call("CHECK", "a"))
		}
		l.OK(l.Call("DEL", "a"))
	})
}
