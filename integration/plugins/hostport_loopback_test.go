// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestLoopbackFromOutside (S-07): only the node itself reaches hostPorts and services at 127.0.0.1. Packets for it that another machine or
// a pod sends to the node's MAC reach neither, even after all rules were flushed and restored. Moby had this problem: CVE-2025-54388 and
// CVE-2025-54410.
func TestLoopbackFromOutside(t *testing.T) {
	harness.Program(t, "nft")
	harness.Need(t, "podlace")
	open := harness.Ports(harness.Port(8081, 80, "tcp"), harness.Port(8081, 80, "udp"))
	caps := harness.Mappings(append(web8080("127.0.0.1")["portMappings"].([]any), open...)...)
	eachCrossing(t, caps, func(t *testing.T, c crossingLab) {
		c.Must(t, "ADD", c.rtWeb)
		c.Must(t, "ADD", c.rtClient)
		startSpeakers(t, c.web, "[::]:80")
		startSpeakers(t, nil, "127.0.0.1:9999")
		prepareAttack(t, c.lan, harness.NodeV4, harness.LANV4)
		prepareAttack(t, c.client, "10.71.0.1", harness.IPv4Of(t, c.client))
		c.checkClosed(t)
		harness.Shell(t, "nft delete table inet podlace_loopback")
		checkAnswers(t, "8080 8081", netQuery{c.lan, "127.0.0.1", c.web.Name}) // control: without the table the attack succeeds
		checkAnswers(t, "9999", netQuery{c.client, "127.0.0.1", harness.NameOf(nil)})
		for _, repair := range []func(){
			func() { c.Must(t, "STATUS", nil) },
			func() { harness.Shell(t, filepath.Join(harness.BinDir(), "podlace")+" reload") },
		} {
			repair()
			c.checkClosed(t)
			harness.Shell(t, "nft flush ruleset")
			checkAnswers(t, "8080 8081", netQuery{c.lan, "127.0.0.1", ""})
			repair()
			c.checkClosed(t)
		}
		c.Must(t, "DEL", c.rtWeb)
		c.Must(t, "DEL", c.rtClient)
	})
}

// checkClosed checks that the node, and no other machine, reaches the ports of 127.0.0.1.
func (c crossingLab) checkClosed(t *testing.T) {
	t.Helper()
	checkAnswers(t, "8080 8081", netQuery{nil, "127.0.0.1", c.web.Name})
	checkAnswers(t, "9999", netQuery{nil, "127.0.0.1", harness.NameOf(nil)})
	checkAnswers(t, "8080 8081 9999", netQuery{c.lan, "127.0.0.1", ""}, netQuery{c.client, "127.0.0.1", ""})
}

// prepareAttack makes a machine send packets for 127.0.0.1 through the node and accept the replies.
func prepareAttack(t *testing.T, from *sandbox.Pod, node, own string) {
	t.Helper()
	harness.Shell(t, fmt.Sprintf(`ip -n %[1]s addr flush dev lo scope host; ip -n %[1]s route add 127.0.0.0/8 via %[2]s src %[3]s`, from.Name,
		node, own))
	err := from.Do(func() error {
		return exec.Command("sysctl", "-qw", "net.ipv4.conf.eth0.route_localnet=1", "net.ipv4.conf.eth0.rp_filter=0").Run()
	})
	if err != nil {
		t.Fatal(err)
	}
}
