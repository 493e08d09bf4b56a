// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
)

// TestLoopbackAfterLoss (S-07): after the loss of the hostPorts' records and a DEL or GC, a pod still reaches no service on the node's
// 127.0.0.1, even if all rules are flushed and a verb makes changes.
func TestLoopbackAfterLoss(t *testing.T) {
	harness.Program(t, "nft")
	caps := harness.Mappings(harness.Port(8080, 80, "tcp"))
	eachCrossing(t, caps, func(t *testing.T, c crossingLab) {
		startSpeakers(t, nil, "127.0.0.1:9999")
		client := types.GCAttachment{ContainerID: c.rtClient.ContainerID, IfName: c.rtClient.IfName}
		gc := func() { c.Must(t, "GC", nil, client) }
		del := func() { c.Must(t, "DEL", c.rtWeb) }
		add := func() { c.Must(t, "DEL", c.rtClient); c.Must(t, "ADD", c.rtClient); c.attackByClient(t) }
		for _, loss := range []struct {
			title, command string
			then           func()
		}{
			{"all state, then DEL", "rm -rf /run/podlace", del},
			{"all state, then GC", "rm -rf /run/podlace", gc},
			{"users of 127.0.0.1, then DEL", "rm -rf /run/podlace/.localhost", del},
			{"users of 127.0.0.1, then GC", "rm -rf /run/podlace/.localhost", gc},
			{"rules, then DEL of another pod and ADD without ports", "nft flush ruleset", add},
			{"rules, then GC", "nft flush ruleset", gc},
			{"rules, then STATUS", "nft flush ruleset", func() { c.Must(t, "STATUS", nil) }},
			{"state and rules, then GC", "rm -rf /run/podlace; nft flush ruleset", gc},
			{"state and rules, then DEL", "rm -rf /run/podlace; nft flush ruleset", del},
		} {
			c.Must(t, "ADD", c.rtWeb)
			c.Must(t, "ADD", c.rtClient)
			c.attackByClient(t)
			checkAnswers(t, "9999", netQuery{c.client, "127.0.0.1", ""})
			harness.Shell(t, loss.command)
			loss.then()
			if got, err := harness.Dial(c.client, "127.0.0.1:9999", harness.Patience(true)); err == nil {
				t.Errorf("after loss of %s: a pod reaches %q on the node's 127.0.0.1", loss.title, got)
			}
			c.Must(t, "DEL", c.rtWeb)
			c.Must(t, "DEL", c.rtClient)
			c.Must(t, "GC", nil)
			if left := loopbackState(t); left != "" {
				t.Errorf("after loss of %s, and DEL and GC of all: %s remains", loss.title, left)
			}
		}
	})
}

func (c crossingLab) attackByClient(t *testing.T) {
	t.Helper()
	prepareAttack(t, c.client, "10.71.0.1", harness.IPv4Of(t, c.client))
}

// loopbackState returns the sysctls that open 127.0.0.1 to other machines, and the tables that prevent this.
func loopbackState(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("sh", "-c", "grep -v '^0$' /proc/sys/net/ipv4/conf/*/route_localnet; nft list tables | grep podlace_loopback; true").Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/run/podlace/.localhost"); err == nil {
		found, err := exec.Command("find", "/run/podlace/.localhost", "-mindepth", "1").Output()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, found...)
	}
	return strings.TrimSpace(string(out))
}
