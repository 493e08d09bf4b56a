// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestFaultHostPort moves a hostPort from one pod to another while clients send datagrams.
func TestFaultHostPort(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run("F-38 pods come and go behind a UDP sender, "+backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			testSender(t, newCrossing(t, string(harness.ChainOf(t, "1.1.0", backend)), harness.HostPort()))
		})
	}
}

// udpSender sends datagrams from one source port without a pause.
type udpSender struct {
	net.Conn
	title   string
	asked   int
	answers chan string
}

func startSender(t *testing.T, from *sandbox.Pod, title, address string) *udpSender {
	t.Helper()
	s := &udpSender{title: title + " to " + address, answers: make(chan string, 100)}
	if err := harness.Networked(from, func() (err error) { s.Conn, err = net.Dial("udp", address); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	go func() {
		for ; !errors.Is(s.sendText("still here"), net.ErrClosed); time.Sleep(time.Millisecond) {
		}
	}()
	go func() {
		b := make([]byte, 1500)
		for {
			n, err := s.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				s.answers <- string(b[:n])
			}
		}
	}()
	return s
}

// sendText sends a datagram and retries once it fails: the kernel reports the ICMP error of a closed port at the socket's next send.
func (s *udpSender) sendText(text string) (err error) {
	for range 100 {
		if _, err = s.Write([]byte(text)); err == nil || errors.Is(err, net.ErrClosed) {
			break
		}
	}
	return err
}

// askNext sends one datagram, and returns the name of the pod that answers.
func (s *udpSender) askNext() (string, error) {
	s.asked++
	text := fmt.Sprintf("question %d?", s.asked)
	if err := s.sendText(text); err != nil {
		return "", err
	}
	limit := time.After(harness.TrafficLimit)
	for {
		select {
		case answer := <-s.answers:
			if who, ok := strings.CutSuffix(answer, " "+text); ok {
				return who, nil
			}
		case <-limit:
			return "", errors.New("no answer")
		}
	}
}

// testSender checks that the first datagram after each ADD and DEL reaches the port's owner: the pod that has it, the second pod of the
// same name that requests it, or the node if no pod has it.
func testSender(t *testing.T, c crossingLab) {
	const port53 = "5353"
	caps := harness.Mappings(harness.Port(5353, 53, "udp"))
	var y harness.Tally
	for _, p := range families() {
		startSpeakers(t, nil, net.JoinHostPort(p.node, port53))
	}
	startSpeakers(t, nil, "127.0.0.1:"+port53)
	startSpeakers(t, c.web, "[::]:53")
	startSpeakers(t, c.client, "[::]:53")
	c.rtWeb.CapabilityArgs, c.rtClient.CapabilityArgs = caps, caps
	senders := []*udpSender{startSender(t, nil, "the node", "127.0.0.1:"+port53)}
	for _, p := range families() {
		address := net.JoinHostPort(p.node, port53)
		senders = append(senders, startSender(t, c.lan, "another machine", address), startSender(t, nil, "the node", address))
	}
	sameName := harness.Named(c.client, caps)
	sameName.Args = c.rtWeb.Args
	for range harness.Some(1, 20) {
		for _, x := range []struct {
			verb string
			rt   *libcni.RuntimeConf
			has  *sandbox.Pod
		}{
			{"ADD", c.rtWeb, c.web}, {"DEL", c.rtWeb, nil}, {"ADD", c.rtClient, c.client}, {"DEL", c.rtClient, nil},
			{"ADD", c.rtWeb, c.web}, {"ADD", sameName, c.client}, {"DEL", c.rtWeb, c.client}, {"DEL", sameName, nil},
		} {
			c.Must(t, x.verb, x.rt)
			for _, s := range senders {
				y.Points++
				if got, err := s.askNext(); got != harness.NameOf(x.has) {
					t.Errorf("%s, after %s of %s: %q answers, want %q (%v)", s.title, x.verb, x.rt.ContainerID, got, harness.NameOf(x.has), err)
				}
			}
		}
	}
	y.Report(t)
}
