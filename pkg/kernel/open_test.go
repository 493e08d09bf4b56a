// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"os"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestOpenLeaves: Close releases a pod's namespace completely, so that the kernel deletes it and the veth pair.
func TestOpenLeaves(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	for range 50 {
		pod := kerneltest.NewPod(t)
		f, err := os.Open(pod.Path)
		kerneltest.Must(t, err)
		_, err = h.AddVeth(Veth{Host: "kth0", Pod: "eth0", Netns: f})
		n, openErr := Open(f)
		kerneltest.Must(t, err, openErr)
		n.Close()
		kerneltest.Must(t, f.Close(), pod.Close())
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			if _, ok, err := h.Link("kth0"); !ok {
				kerneltest.Must(t, err)
				break
			}
			if time.Now().After(end) {
				kerneltest.Must(t, h.DelLink("kth0"))
				t.Fatal("the namespace is still there, with its end of the veth")
			}
		}
	}
}
