// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// foreignLinks are commands that create a link with a given name, as another program does.
var foreignLinks = map[string]string{
	"veth":   "ip link add %s type veth peer name foreign1",
	"bridge": "ip link add %s type bridge",
	"port":   "ip link add %s type veth peer name foreign1 && ip link set %[1]s master chain0 up",
}

// foreignNames are the link names that Podlace uses for the tested pod.
func foreignNames() map[string]string {
	key := attachment.Key{Network: "chain", ContainerID: victimID, IfName: "eth0"}
	return map[string]string{"host side": key.HostVeth(), "device of the egress limit": "bwp" + key.ReferenceHash()[:12]}
}

func runShell(line string, args ...any) error {
	line = fmt.Sprintf(line, args...)
	if out, err := exec.Command("/bin/sh", "-ec", line).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

// TestFaultForeignLink (F-18): if another program's link has a name that Podlace needs, ADD fails, and neither it nor DEL or GC changes the
// link.
func TestFaultForeignLink(t *testing.T) {
	harness.Program(t, "ip")
	s := newSweep(t, "nftables")
	for of, name := range harness.InOrder(foreignNames()) {
		for kind, command := range harness.InOrder(foreignLinks) {
			for _, then := range []string{thenDel, thenEmptied, thenCollect} {
				title := fmt.Sprintf("a %s with the name of the %s, then %s", kind, of, then)
				s.tryCase(t, title, func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
					if err := runShell(command, name); err != nil {
						return err
					}
					made, err := net.InterfaceByName(name)
					if err != nil {
						return err
					}
					_, add := s.Do("ADD", rt, nil)
					if add == nil {
						err = errors.New("ADD succeeded")
					}
					err = errors.Join(err, harness.Coded(add), s.followUp(killCase{then: then, at: 2}, pod, rt))
					if now, gone := net.InterfaceByName(name); gone != nil || now.Index != made.Index {
						return errors.Join(err, fmt.Errorf("the foreign link is gone after %w", add))
					}
					return errors.Join(err, runShell("ip link del %s", name))
				})
			}
		}
	}
	s.Report(t)
}

// TestFaultLinkExchanged: another program renames or deletes a running pod's host-side veth, and gives its name to a foreign link. DEL
// removes only the pod's own links, even without records.
func TestFaultLinkExchanged(t *testing.T) {
	harness.Program(t, "ip")
	s := newSweep(t, "nftables")
	name := foreignNames()["host side"]
	hash := attachment.Key{Network: "chain", ContainerID: victimID, IfName: "eth0"}.Hash()
	for what, command := range harness.InOrder(map[string]string{
		"renamed":              "ip link set %[1]s down; ip link set %[1]s name moved1; ip link set moved1 up",
		"renamed and replaced": "ip link set %[1]s down; ip link set %[1]s name moved1; ip link add %[1]s type bridge",
		"replaced by a bridge": "ip link del %[1]s; ip link add %[1]s type bridge",
		"replaced by a veth":   "ip link del %[1]s; ip link add %[1]s type veth peer name foreign1",
		"deleted":              "ip link del %[1]s",
		"renamed, then a veth": "ip link set %[1]s down; ip link set %[1]s name moved1; ip link add %[1]s type veth peer name foreign1",
	}) {
		for _, lost := range []bool{false, true} {
			s.tryCase(t, fmt.Sprintf("host side %s, records lost %t", what, lost), func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
				if _, err := s.Do("ADD", rt, nil); err != nil {
					return err
				}
				if err := runShell(command, name); err != nil {
					return err
				}
				made, none := net.InterfaceByName(name)
				if lost {
					files, err := filepath.Glob("/run/podlace/chain/*-" + hash)
					for _, f := range files {
						err = errors.Join(err, os.Remove(f))
					}
					if err != nil {
						return err
					}
				}
				_, err := s.Do("DEL", rt, nil)
				if _, left := net.InterfaceByName("moved1"); left == nil {
					err = errors.Join(err, errors.New("the host side remains under its new name"), runShell("ip link del moved1"))
				}
				if none != nil {
					return err
				}
				if now, gone := net.InterfaceByName(name); gone != nil || now.Index != made.Index {
					return errors.Join(err, errors.New("the foreign link is gone"))
				}
				return errors.Join(err, runShell("ip link del %s", name))
			})
		}
	}
	s.Report(t)
}
