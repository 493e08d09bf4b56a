// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// requestPace is the time between two echo requests of a flow. Six flows together send 1,000 requests a second.
const requestPace = 6 * time.Millisecond

// echoFlow is a stream of echo requests to a pod of another node. The sender's kernel counts the replies, so a slow test misses none. It
// counts those to a pod together, so two flows of a family must not start in the same pod.
type echoFlow struct {
	from, to, family string
	place            *netPlace
	conn             net.Conn
	sent             atomic.Int64
	before           int // replies
}

func (f *echoFlow) String() string { return fmt.Sprintf("%s to %s, IPv%s", f.from, f.to, f.family) }

// echoTraffic consists of flows that run until they are stopped.
type echoTraffic struct {
	flows   []*echoFlow
	stop    chan struct{}
	running sync.WaitGroup
	began   time.Time
}

// podPairs returns one pair of pods for each pair of nodes.
func podPairs() [][2]string {
	return [][2]string{{"client1", "server2"}, {"client2", "server3"}, {"client3", "server1"}}
}

// pairWithoutNode2 returns a pair of pods on other nodes than node2. It can be used with podPairs, none of which starts at the same pod.
func pairWithoutNode2() [2]string { return [2]string{"server3", "client1"} }

// startTraffic starts an IPv4 and an IPv6 flow between each pair of pods.
func (w *testWorld) startTraffic(t *testing.T, pairs ...[2]string) *echoTraffic {
	t.Helper()
	r := &echoTraffic{stop: make(chan struct{}), began: time.Now()}
	for _, p := range pairs {
		for _, family := range w.families {
			f := &echoFlow{from: p[0], to: p[1], family: family, place: w.places[p[0]]}
			if err := f.open(w.places[p[1]].address[family]); err != nil {
				t.Fatalf("%s: %v", f, err)
			}
			r.flows = append(r.flows, f)
		}
	}
	for _, f := range r.flows {
		f.before = f.countReplies(t)
		r.running.Go(func() { f.runFlow(r.stop) })
	}
	return r
}

func (f *echoFlow) open(address string) error {
	network := map[string]string{"4": "ip4:icmp", "6": "ip6:ipv6-icmp"}[f.family]
	return f.place.Do(func() (err error) {
		f.conn, err = net.DialIP(network, nil, &net.IPAddr{IP: netip.MustParseAddr(address).AsSlice()})
		return err
	})
}

// runFlow sends requests at fixed times, so that a late one does not delay the next. One that cannot be sent counts as lost.
func (f *echoFlow) runFlow(stop chan struct{}) {
	message := make([]byte, 64)
	message[0] = map[string]byte{"4": 8, "6": 128}[f.family]
	binary.BigEndian.PutUint16(message[4:], 142)
	begin := time.Now()
	for i := 1; ; i++ {
		select {
		case <-stop:
			_ = f.conn.Close()
			return
		case <-time.After(time.Until(begin.Add(time.Duration(i) * requestPace))):
		}
		binary.BigEndian.PutUint16(message[6:], uint16(i))
		if f.family == "4" { // the kernel computes the checksum of ICMPv6
			binary.BigEndian.PutUint16(message[2:], 0)
			binary.BigEndian.PutUint16(message[2:], checksum(message))
		}
		_, _ = f.conn.Write(message)
		f.sent.Add(1)
	}
}

// checksum returns the Internet checksum of RFC 1071.
func checksum(message []byte) uint16 {
	var sum uint32
	for i := 0; i < len(message); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(message[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// countReplies returns the number of echo replies that the sender's kernel has received.
func (f *echoFlow) countReplies(t *testing.T) (count int) {
	t.Helper()
	err := f.place.Do(func() error {
		if f.family == "6" {
			text, err := os.ReadFile("/proc/thread-self/net/snmp6")
			if err != nil {
				return err
			}
			_, after, _ := strings.Cut(string(text), "Icmp6InEchoReplies")
			count, err = strconv.Atoi(strings.Fields(after)[0])
			return err
		}
		text, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		_, after, _ := strings.Cut(string(text), "\nIcmp: ")
		names, values, _ := strings.Cut(after, "\nIcmp: ")
		count, err = strconv.Atoi(strings.Fields(values)[slices.Index(strings.Fields(names), "InEchoReps")])
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", f, err)
	}
	return count
}

// countLost returns the number of requests that have no reply so far.
func (f *echoFlow) countLost(t *testing.T) int {
	sent := int(f.sent.Load())
	return sent - (f.countReplies(t) - f.before)
}

// endFlows stops the flows, waits for outstanding replies, and prints the losses of each. It returns the sum of lost packets between other
// nodes, and the largest loss of a flow from or to a pod of this node. Without a node's name, the sum includes all.
func (r *echoTraffic) endFlows(t *testing.T, except string) (lost, exceptLost int) {
	t.Helper()
	close(r.stop)
	r.running.Wait()
	took := time.Since(r.began)
	sent, texts := 0, []string{}
	for _, f := range r.flows {
		missing, limit := f.countLost(t), time.Now().Add(10*time.Second)
		if except != "" { // in this case, many replies never arrive
			limit = time.Now().Add(time.Second)
		}
		for ; missing > 0 && time.Now().Before(limit); missing = f.countLost(t) {
			time.Sleep(50 * time.Millisecond)
		}
		number := strings.TrimPrefix(except, "node")
		if except != "" && (strings.HasSuffix(f.from, number) || strings.HasSuffix(f.to, number)) {
			exceptLost = max(exceptLost, missing)
		} else {
			lost += missing
		}
		sent += int(f.sent.Load())
		texts = append(texts, fmt.Sprintf("%s: %d", f, missing))
	}
	t.Logf("%d echo requests in %.1f s, %.0f a second; lost: %s; load %s", sent, took.Seconds(), float64(sent)/took.Seconds(),
		strings.Join(texts, "; "), loadAverage())
	return lost, exceptLost
}

// loadAverage returns the machine's load average of the last minute.
func loadAverage() string {
	text, _ := os.ReadFile("/proc/loadavg")
	one, _, _ := strings.Cut(string(text), " ")
	return one
}
