// SPDX-License-Identifier: Apache-2.0

package cli

import (
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

// TestBrokenPod: of a pod whose bridge is down, whose link is deleted, and whose records are torn, the commands say what is broken, with a
// remedy that helps.
func TestBrokenPod(t *testing.T) {
	if !sandboxed(t) {
		return
	}
	type object = kerneltest.Object
	pod, dir := kerneltest.NewPod(t), t.TempDir()
	main := kerneltest.Lab{T: t, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Pod: pod, Conf: object{"cniVersion": "1.1.0", "name": "net",
		"type": "bridge", "bridge": "broken0", "ipam": object{"type": "host-local", "subnet": "10.93.0.0/29"}}}
	var prev object
	kerneltest.Must(t, json.Unmarshal(main.OK(main.Call("ADD", "a")).Stdout, &prev))
	limits := kerneltest.Lab{T: t, Plugin: bandwidth.Plugin().Run, Pod: pod, Conf: object{"cniVersion": "1.1.0", "name": "net",
		"type": "bandwidth", "runtimeConfig": object{"bandwidth": object{"ingressRate": 8000, "ingressBurst": 8 * 5000}}, "prevResult": prev}}
	limits.OK(limits.Call("ADD", "a"))
	key := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	torn := func() error {
		return os.WriteFile("/run/podlace/net/bandwidth-"+key.Hash(), []byte("{"), 0o600)
	}
	for _, c := range []struct {
		spoil, command string
		status         int
		want, without  string
	}{
		{"true", "topology", exitOK, "bridge broken0: up", "down"},
		{"true", "reload", exitOK, "reloaded: 1 attachments of bridge", "down"},
		{"ip link set broken0 down", "topology", exitOK, "bridge broken0: down", ""},
		{"true", "reload", exitOK, "the bridge of pods is down and is set up", "missing"},
		{"mv /run/podlace/net /run/podlace/.moved", "reload", exitFailed, "limits of 1 pods cannot be restored", "reloaded"},
		{"mv /run/podlace/.moved /run/podlace/net", "reload", exitOK, "reloaded: 1 attach", "cannot"},
		{"ip link set " + key.HostVeth() + " down", "topology", exitOK, "interface down", "interface missing"},
		{"ip link set " + key.HostVeth() + " up", "reload", exitOK, "reloaded: 1 attachments of bridge", "down"},
		{"tc qdisc del dev " + key.HostVeth() + " root", "limits --interval 10ms", exitDiffers, "missing: podlace reload restores it",
			"delete the pod"},
		{"ip link del " + key.HostVeth(), "limits --interval 10ms", exitDiffers, " is missing: delete the pod", "podlace reload"},
		{"true", "topology", exitOK, "interface missing", ""},
		{"true", "rollback", exitOK, "Nothing was changed", "Only the binaries"},
		{"torn", "rollback", exitDiffers, "Nothing was changed", "Only the binaries"},
		{"true", "top --once --interval 100ms", exitFailed, "cannot be read", ""},
		{"true", "limits --interval 10ms", exitFailed, "cannot be read", ""},
	} {
		if c.spoil == "torn" {
			kerneltest.Must(t, torn())
		} else if out, err := exec.Command("sh", "-c", c.spoil).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v, %s", c.spoil, err, out)
		}
		args := strings.Fields(c.command)
		if args[0] == "topology" || args[0] == "rollback" {
			args = append(args, "--conf-dir", dir)
		}
		status, stdout, stderr := run(args...)
		if out := stdout + stderr; status != c.status || !strings.Contains(out, c.want) || c.without != "" && strings.Contains(out, c.without) {
			t.Errorf("after %s, %s: status %d, want %d and %q\n%s", c.spoil, c.command, status, c.status, c.want, out)
		}
	}
}
