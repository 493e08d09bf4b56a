// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// inOther returns the keys of a second network of the same container: the backend, and the pod's address there.
func inOther(backend string, ports ...any) []any {
	return append(asking("10.71.0.9/24", ports...), "name", "other", "backend", backend)
}

// If two attachments of a container share a hostPort and one ends, through DEL, GC or after its record was lost, the other has the port:
// its CHECK passes, and ADD of another pod fails until it ends too (F-39).
func TestPortPassesOn(t *testing.T) {
	kerneltest.Slow(t)
	ends := map[string]func(l testLab, first []any){
		"DEL": func(l testLab, first []any) { l.OK(l.Call("DEL", "a", first...)) },
		"DEL without the record": func(l testLab, first []any) {
			if err := os.Remove(l.recordFile("a")); err != nil {
				l.Fatal(err)
			}
			l.OK(l.Call("DEL", "a", first...))
		},
		"GC": func(l testLab, first []any) {
			if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
				l.Fatal(err)
			}
			l.OK(l.Call("GC", "", append(first, "cni.dev/valid-attachments", []any{})...))
		},
	}
	eachBackend(t, func(l testLab) {
		for _, other := range []string{"nftables", "iptables"} {
			for what, ports := range map[string][]any{"one": {port(8080, 80, "tcp")}, "range": sequence(8080, 20)} {
				for verb, end := range ends {
					if verb == "DEL without the record" && l.Conf["backend"] == "iptables" {
						continue // GC cannot remove these rules; TestLostRecord covers DEL
					}
					l.Run(other+" "+what+" "+verb, func(t *testing.T) {
						l := l
						l.T = t
						l.passesOn(other, ports, end)
					})
				}
			}
		}
	})
}

func (l testLab) passesOn(other string, ports []any, end func(l testLab, first []any)) {
	first, second := asking("10.71.0.5/24", ports...), inOther(other, ports...)
	l.OK(l.Call("ADD", "a", first...))
	l.OK(l.Call("ADD", "a", second...))
	end(l, first)
	l.OK(l.Call("CHECK", "a", second...))
	for _, backend := range []string{"nftables", "iptables"} {
		b, args := l.withName("b")
		ask := append(asking("10.71.0.6/24", ports...), "CNI_ARGS", args, "backend", backend)
		b.Fails(b.Call("ADD", "b", ask...), plugin.CodePortConflict, "is in use by shop/a, container a, since 20")
		l.OK(l.Call("CHECK", "a", second...))
		if backend == other {
			l.OK(l.Call("DEL", "a", second...))
			b.OK(b.Call("ADD", "b", ask...))
			b.OK(b.Call("CHECK", "b", ask...))
			b.OK(b.Call("DEL", "b", ask...))
			l.OK(l.Call("ADD", "a", second...))
		}
	}
	l.OK(l.Call("DEL", "a", second...))
	if left := podElements(l.T); len(left) > 1 || l.isMapped("a") { // the schema mark stays
		l.Errorf("left %q", left)
	}
}

// After a flush, a port that two networks of a container share is restored for both (F-21).
func TestSharedAfterFlush(t *testing.T) {
	eachBackend(t, func(l testLab) {
		for _, other := range []string{"nftables", "iptables"} {
			first, second := asking("10.71.0.5/24", port(8080, 80, "tcp")), inOther(other, port(8080, 80, "tcp"))
			l.OK(l.Call("ADD", "a", first...))
			l.OK(l.Call("ADD", "a", second...))
			if err := errors.Join(kerneltest.FlushNFT(), Restore(openHost(l.T), slog.Default())); err != nil {
				l.Error(err)
			}
			l.OK(l.Call("CHECK", "a", first...))
			l.OK(l.Call("CHECK", "a", second...))
			l.OK(l.Call("DEL", "a", first...))
			l.OK(l.Call("CHECK", "a", second...))
			l.OK(l.Call("DEL", "a", second...))
		}
	})
}

// If another network of the container has a part of the requested range, ADD forwards the rest. The whole range is forwarded once the other
// attachment ends.
func TestSharedInPart(t *testing.T) {
	eachBackend(t, func(l testLab) {
		for what, first := range map[string][]any{"single": {port(8085, 8085, "tcp")}, "range": sequence(8070, 20)} {
			ask, rest := asking("10.71.0.5/24", first...), inOther(l.Conf["backend"].(string), sequence(8080, 20)...)
			l.OK(l.Call("ADD", "a", ask...))
			l.OK(l.Call("ADD", "a", rest...))
			l.OK(l.Call("CHECK", "a", rest...))
			free := func(port int) bool {
				b, args := l.withName("b")
				o := b.Call("ADD", "b", append(asking("10.71.0.6/24", object{"hostPort": port, "containerPort": 80}), "CNI_ARGS", args)...)
				b.OK(b.Call("DEL", "b"))
				return o.Exit == 0
			}
			for _, port := range []int{8080, 8085, 8099} {
				if free(port) {
					l.Errorf("%s: another pod gets port %d, which the container asked for in its second network", what, port)
				}
			}
			l.OK(l.Call("DEL", "a", ask...))
			l.OK(l.Call("CHECK", "a", rest...))
			for _, port := range []int{8080, 8085, 8099} {
				if free(port) {
					l.Errorf("%s: after DEL of the first network another pod gets port %d", what, port)
				}
			}
			l.OK(l.Call("DEL", "a", rest...))
			if left := podElements(l.T); len(left) > 1 {
				l.Errorf("%s: left %q", what, left)
			}
		}
	})
}

// If an older pod shares a port in several networks, a newer one of the same name takes it in all of them, and no iptables rule of the
// older container precedes its own (F-39).
func TestTakeOverOfShared(t *testing.T) {
	kerneltest.Slow(t)
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	for _, backend := range []string{"nftables", "iptables"} {
		for _, gone := range []bool{false, true} {
			if err := kerneltest.FlushNFT(); err != nil {
				t.Fatal(err)
			}
			old, args := l.withName("web-0")
			old.OK(old.Call("ADD", "old", append(asking("10.71.0.5/24", port(8080, 80, "tcp")), "CNI_ARGS", args)...))
			old.OK(old.Call("ADD", "old", append(inOther("iptables", port(8080, 80, "tcp")), "CNI_ARGS", args)...))
			if gone {
				if err := old.Pod.Close(); err != nil {
					t.Fatal(err)
				}
			}
			next, _ := l.withName("web-0")
			ask := append(asking("10.71.0.6/24", port(8080, 80, "tcp")), "CNI_ARGS", args, "backend", backend)
			next.OK(next.Call("ADD", "next", ask...))
			next.OK(next.Call("CHECK", "next", ask...))
			for _, rule := range natTable(t, true).Rules(dnatChain, "8080") {
				if !strings.Contains(rule, l.chain("next")) {
					t.Errorf("%s, gone %t: %s", backend, gone, rule)
				}
			}
			for _, keys := range [][]any{nil, {"name", "other"}} {
				old.OK(old.Call("DEL", "old", append(keys, "CNI_NETNS", "")...))
			}
			next.OK(next.Call("CHECK", "next", ask...))
			next.OK(next.Call("DEL", "next", ask...))
		}
	}
}

// If an ADD fails after it took a port from an older pod of the same name, the older pod gets the port back.
func TestFailedTakeOver(t *testing.T) {
	l := newLab(t)
	old, args := l.withName("web-0")
	ask := append(asking("10.71.0.5/24", port(8080, 80, "tcp")), "CNI_ARGS", args)
	old.OK(old.Call("ADD", "old", ask...))
	next, _ := l.withName("web-0")
	next.OK(next.Call("ADD", "next", append(asking("10.71.0.6/24", port(8080, 80, "tcp")), "CNI_ARGS", args)...))
	next.OK(next.Call("DEL", "next")) // the runtime does this if a later plugin of the chain fails
	old.OK(old.Call("CHECK", "old", ask...))
	old.OK(old.Call("DEL", "old"))
}

// The mark that makes DEL read the records of other pods is only on elements whose port another attachment requests, also after a flush and
// after the next attachment got the port.
func TestHeirsMark(t *testing.T) {
	l := newLab(t)
	marked := func(want string) {
		t.Helper()
		got := ""
		for _, e := range podElements(t) {
			if strings.Contains(e, " ports4 ") && strings.HasSuffix(e, heirsMark+`"`) {
				got += ownerName(e[strings.Index(e, `"`)+1:])
			}
		}
		if got = strings.TrimSuffix(got, heirsMark+`"`); got != want {
			t.Errorf("marked are the ports of %q, want %q: %q", got, want, podElements(t))
		}
	}
	first, second := asking("10.71.0.5/24", port(8080, 80, "tcp")), inOther("nftables", port(8080, 80, "tcp"))
	third := append(slices.Clone(second), "name", "third")
	alone, _ := l.withName("alone")
	other := asking("10.71.0.6/24", port(9090, 90, "tcp"))
	l.OK(l.Call("ADD", "a", first...))
	l.OK(alone.Call("ADD", "b", other...))
	marked("")
	l.OK(l.Call("ADD", "a", second...))
	l.OK(l.Call("ADD", "a", third...))
	marked("shop/a")
	if err := errors.Join(kerneltest.FlushNFT(), Restore(openHost(t), slog.Default())); err != nil {
		t.Error(err)
	}
	marked("shop/a")
	for _, keys := range [][]any{first, second} {
		l.OK(l.Call("DEL", "a", keys...))
		l.OK(l.Call("CHECK", "a", third...))
	}
	// The port of an attachment without the mark passes to no other: DEL does not see the record that is a copy.
	record, err := os.ReadFile(alone.recordFile("b"))
	copied := attachment.Key{Network: alone.Conf["name"].(string), ContainerID: "copy", IfName: "eth0"}
	file := filepath.Join(filepath.Dir(alone.recordFile("b")), "portmap-"+copied.Hash())
	if err := errors.Join(err, os.WriteFile(file, bytes.Replace(record, []byte(`"b"`), []byte(`"copy"`), 1), 0o600)); err != nil {
		t.Fatal(err)
	}
	l.OK(alone.Call("DEL", "b", other...))
	if left := strings.Join(podElements(t), "\n"); strings.Contains(left, copied.Hash()) {
		t.Errorf("DEL read the records of other pods: %s", left)
	}
	if err := os.Remove(file); err != nil {
		t.Error(err)
	}
	l.OK(l.Call("DEL", "a", third...))
}

// If two networks of a dead container share a hostPort, DEL in one leaves no rules of the other that block the next pod.
func TestSharedWithTheDead(t *testing.T) {
	eachBackend(t, func(l testLab) {
		second := inOther(l.Conf["backend"].(string), port(8080, 80, "tcp"))
		first := asking("10.71.0.5/24", port(8080, 80, "tcp"))
		next, _ := l.withName("next")
		l.OK(l.Call("ADD", "a", first...))
		l.OK(l.Call("ADD", "a", second...))
		if err := l.Pod.Close(); err != nil {
			l.Fatal(err)
		}
		gone := []any{"CNI_NETNS", ""}
		l.OK(l.Call("DEL", "a", append(first, gone...)...))
		ask := asking("10.71.0.6/24", port(8080, 80, "tcp"))
		l.OK(next.Call("ADD", "c", ask...))
		if l.Conf["backend"] == "iptables" {
			if natTable(t, true).HasChain(podChain(attachment.Key{Network: "other", ContainerID: "a", IfName: "eth0"})) {
				l.Errorf("the rules of the dead container come first")
			}
		}
		l.OK(next.Call("CHECK", "c", ask...))
		l.OK(l.Call("DEL", "a", append(second, gone...)...))
		l.OK(next.Call("CHECK", "c", ask...))
		l.OK(next.Call("DEL", "c", ask...))
	})
}
