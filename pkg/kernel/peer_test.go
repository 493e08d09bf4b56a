// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"os"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestPeerOf: PeerOf finds the peer of a link, and no link of another pair with the same ifindexes.
func TestPeerOf(t *testing.T) {
	w := newWire(t)
	pod, err := w.pod.File()
	kerneltest.Must(t, err)
	defer pod.Close()
	other := kerneltest.NewPod(t)
	elsewhere, err := os.Open(other.Path)
	kerneltest.Must(t, err)
	defer elsewhere.Close()
	// Both ends of the forged pair are in the second pod, with the ifindexes of the real pair between host and pod.
	kerneltest.Must(t, other.Do(func() error { return kerneltest.ForgePair("veth", "eth0", w.podSide.Index, "q", w.hostSide.Index) }))
	inOther, err := Open(elsewhere)
	kerneltest.Must(t, err)
	defer inOther.Close()
	forged := mustLink(t, inOther, "eth0")
	kerneltest.Must(t, kerneltest.ForgePair("veth", "ktlocal0", 0, "ktlocal1", 0))
	defer func() { kerneltest.Must(t, w.host.DelLink("ktlocal0")) }()
	for what, c := range map[string]struct {
		end   Link
		netns Namespace
		want  string
	}{
		"pod's end":                               {w.podSide, pod, w.hostSide.Name},
		"pod's end, as if of another namespace":   {w.podSide, elsewhere, ""},
		"pod's end, as if of the node's":          {w.podSide, nil, ""},
		"indexes of another pair":                 {forged, elsewhere, ""},
		"indexes of another pair, and its netns":  {forged, pod, w.hostSide.Name}, // the caller names the namespace
		"pair of the node":                        {mustLink(t, w.host, "ktlocal0"), nil, "ktlocal1"},
		"pair of the node, as if of a pod":        {mustLink(t, w.host, "ktlocal0"), pod, ""},
		"host's end, whose peer is elsewhere":     {w.hostSide, nil, ""},
		"a link without a peer":                   {w.bridge, nil, ""},
		"a link without a peer, as if of the pod": {w.bridge, pod, ""},
	} {
		if link, ok, err := w.host.PeerOf(c.end, c.netns); link.Name != c.want || ok != (c.want != "") || err != nil {
			t.Errorf("%s: %q, %t, %v, want %q", what, link.Name, ok, err, c.want)
		}
	}
}
