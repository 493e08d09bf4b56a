// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
)

// inSandbox, if set, marks a test process in namespaces of its own.
const inSandbox = "CLI_TEST_SANDBOX"

// sandboxed runs the calling test again in namespaces of its own, and reports whether this is that run.
func sandboxed(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inSandbox) != "" {
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), inSandbox+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	} else if !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Skipf("SKIPPED: %s", out)
	}
	return false
}

// TestTopDrops: DROPS counts the packets that a pod's limit drops, which the kernel does not count for the interface.
func TestTopDrops(t *testing.T) {
	if !sandboxed(t) {
		return
	}
	pod := kerneltest.NewPod(t)
	type object = kerneltest.Object
	conf := object{"cniVersion": "1.1.0", "name": "net", "type": "bridge", "bridge": "top0",
		"ipam": object{"type": "host-local", "ranges": [][]object{{{"subnet": "10.93.0.0/29"}}}}}
	main := kerneltest.Lab{T: t, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Conf: conf, Pod: pod}
	var prev object
	kerneltest.Must(t, json.Unmarshal(main.OK(main.Call("ADD", "a")).Stdout, &prev))
	limits := kerneltest.Lab{T: t, Plugin: bandwidth.Plugin().Run, Pod: pod, Conf: object{"cniVersion": "1.1.0", "name": "net",
		"type": "bandwidth", "runtimeConfig": object{"bandwidth": object{"ingressRate": 8000, "ingressBurst": 8 * 5000}}, "prevResult": prev}}
	limits.OK(limits.Call("ADD", "a"))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		veth := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.HostVeth()
		var err error
		for ctx.Err() == nil && err == nil {
			err = kerneltest.Flood(veth, 1000)
		}
		done <- err
	}()
	status, stdout, stderr := run("top", "--once", "--conf-dir", t.TempDir(), "--interval", "500ms", "-o", "json")
	stop()
	kerneltest.Must(t, <-done)
	var list []traffic
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || status != 0 || len(list) != 1 {
		t.Fatalf("status %d, %q, %q: %v", status, stdout, stderr, err)
	}
	if list[0].Ingress.Dropped < 100 || list[0].Egress.Dropped != 0 {
		t.Errorf("%+v: the limit drops almost each packet", list[0])
	}
	kerneltest.Must(t, os.WriteFile("/run/podlace/net/bandwidth-"+strings.Repeat("0", 40), []byte("{"), 0o600))
	status, _, stderr = run("top", "--once", "--conf-dir", t.TempDir(), "--interval", "10ms")
	if status != exitFailed || !strings.Contains(stderr, "cannot be read and is skipped") {
		t.Errorf("damaged record: status %d, %q", status, stderr)
	}
}
