// SPDX-License-Identifier: Apache-2.0

package neighbours

import (
	"errors"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// dropped is what fails while Docker's policy DROP applies to the packets of pods.
var dropped = []string{"pod to pod, IPv4", "pod to outside, IPv4", "outside to hostPort, IPv4", "pod to hostPort, IPv4"}

// eachProxy runs a test with rules of Podlace in nftables and iptables, and Docker with and without its userland proxy.
func eachProxy(t *testing.T, test func(l *lab, proxy string)) {
	for _, conflist := range []string{byNftables, byIPTables} {
		for _, proxy := range []string{"--userland-proxy=true", "--userland-proxy=false"} {
			t.Run(conflist+", dockerd "+proxy, func(t *testing.T) { test(newLab(t, conflist), proxy) })
		}
	}
}

// acceptBridge runs the documented commands for DOCKER-USER, which doctor prints too.
func (l *lab) acceptBridge() {
	l.Helper()
	commands := documented(l.T, "iptables")
	l.advises(commands...)
	harness.Shell(l, strings.Join(commands, "\n"))
	l.advises()
}

// TestDockerFirst: if Docker starts before the first pod, the node does not forward yet, and Docker sets the policy DROP. The documented
// rules let the packets of pods pass, also after a restart of Docker. After a boot, only the documented sysctl helps.
func TestDockerFirst(t *testing.T) {
	eachProxy(t, func(l *lab, proxy string) {
		docker := l.startDocker(proxy)
		l.addPods()
		kerneltest.Must(l, l.publish(8090))
		l.docker = true
		l.fails("Docker before the first pod", dropped...)
		l.acceptBridge()
		l.fails("with the rules")
		docker.restart()
		l.fails("after a restart of Docker")
		l.boot(docker, ":")
		l.fails("after a boot", dropped...)
		l.acceptBridge()
		l.fails("with the rules after a boot")
		harness.Shell(l, documented(l.T, "printf 'net.ipv4.ip_forward=1\\n'")[0])
		l.boot(docker, "sysctl -qp /etc/sysctl.d/50-podlace.conf")
		l.advises()
		l.fails("after a boot with forwarding")
	})
}

// boot restarts Docker like a boot: the node has no rules and does not forward, unless the settings change that. Podlace's pods stay.
func (l *lab) boot(docker *daemon, settings string) {
	l.Helper()
	docker.stop()
	harness.Shell(l, "nft flush ruleset; sysctl -qw net.ipv4.ip_forward=0; "+settings)
	docker.start()
	l.podlace("reload")
}

// TestDockerAfter: if Docker starts after the first pod, all connections work, also during and after a restart of Docker.
func TestDockerAfter(t *testing.T) {
	eachProxy(t, func(l *lab, proxy string) {
		l.addPods()
		docker := l.startDocker(proxy)
		kerneltest.Must(l, l.publish(8090))
		l.docker = true
		l.fails("Docker after the first pod")
		l.advises()
		l.docker = false
		docker.stop()
		l.fails("while Docker is down")
		docker.start()
		l.docker = true
		l.fails("after a restart of Docker")
		l.podlace("reload")
		l.fails("after podlace reload")
	})
}

// TestDockerPort: a port of the node is a hostPort of a pod, and Docker publishes it. If Podlace's rules are in nftables, Docker gets the
// IPv4 connections, those from the node to 127.0.0.1 only without userland proxy. Otherwise, the first rule gets them, and a restart of
// Docker puts Docker's last. The order in which pod and container start does not matter.
func TestDockerPort(t *testing.T) {
	for _, first := range []string{"container", "pod"} {
		t.Run(first+" first", func(t *testing.T) {
			eachProxy(t, func(l *lab, proxy string) {
				docker := l.startDocker(proxy)
				if first == "container" {
					kerneltest.Must(l, l.publish(8080))
				}
				l.addPods()
				if first == "pod" {
					kerneltest.Must(l, l.publish(8080))
				}
				harness.Shell(l, strings.Join(documented(l.T, "iptables"), "\n"))
				docker8080 := []string{"outside to hostPort, IPv4", "pod to hostPort, IPv4", "node to hostPort, IPv4"}
				if proxy == "--userland-proxy=false" {
					docker8080 = append(docker8080, "node to hostPort at 127.0.0.1, IPv4")
				}
				l.dockerAnswers("at first", docker8080...)
				docker.restart()
				if strings.Contains(l.Name(), byIPTables) {
					docker8080 = nil
				}
				l.dockerAnswers("after a restart of Docker", docker8080...)
				l.podlace("reload")
				l.dockerAnswers("after podlace reload", docker8080...)
			})
		})
	}
}

// dockerAnswers compares the hostPorts that lead to Docker's container.
func (l *lab) dockerAnswers(when string, want ...string) {
	l.Helper()
	l.fails(when, want...)
	holder := map[bool]string{true: "docker", false: "web"}[len(want) > 0]
	if got, err := harness.Dial(l.outside, "192.0.2.1:8080", harness.TrafficLimit); err != nil || got != holder {
		l.Errorf("%s: %q answers at the port of Docker and a pod, want %q: %v", when, got, holder, err)
	}
}

// TestDockerPortRefused: with refuseHostListeners, ADD refuses a port that Docker publishes.
func TestDockerPortRefused(t *testing.T) {
	for _, proxy := range []string{"--userland-proxy=true", "--userland-proxy=false"} {
		t.Run(proxy, func(t *testing.T) {
			l := newLab(t, byNftables, `"snat": true`, `"snat": true, "refuseHostListeners": true`)
			l.startDocker(proxy)
			kerneltest.Must(l, l.publish(8080))
			_, err := l.tryAttach(harness.NewPod(t, "web"), harness.HostPort())
			if refused := new(types.Error); !errors.As(err, &refused) || refused.Code != 104 {
				t.Errorf("got %v, want code 104", err)
			}
		})
	}
}

// TestDockerAndFirewalld: with the documented settings of both, pods keep their connections while firewalld reloads and restarts.
func TestDockerAndFirewalld(t *testing.T) {
	eachBackend(t, func(l *lab, backend string, lost []string) {
		harness.Shell(l, "sysctl -qw net.ipv4.ip_forward=1") // as the documented file does at boot
		firewalld := l.startFirewalld(backend)
		l.startDocker()
		l.addPods()
		harness.Shell(l, documented(l.T, "firewall-cmd")[0])
		l.fails("with the settings")
		for _, event := range firewalldEvents(firewalld) {
			event.do()
			l.fails(event.name, lost...)
			l.podlace("reload")
			l.fails(event.name + " and podlace reload")
		}
	})
}

// TestDockerUserFlushed: firewalld's reload removes the rules in DOCKER-USER.
func TestDockerUserFlushed(t *testing.T) {
	l := newLab(t, byNftables)
	l.startFirewalld("nftables")
	l.startDocker()
	l.addPods()
	harness.Shell(l, documented(l.T, "firewall-cmd")[0])
	l.acceptBridge()
	l.fails("with the rules")
	harness.Shell(l, "firewall-cmd --reload")
	l.fails("after a reload", dropped...)
	l.acceptBridge()
	l.fails("with the rules again")
}

// TestFirewalldAfterDocker: a firewalld that starts after Docker removes Docker's chains but not its policy DROP, and Docker does not
// notice. The commands of doctor work without DOCKER-USER. Docker's next start makes the chains and reloads firewalld for a zone of Docker.
func TestFirewalldAfterDocker(t *testing.T) {
	l := newLab(t, byNftables)
	docker := l.startDocker()
	l.addPods()
	l.startFirewalld("nftables")
	trust := documented(t, "firewall-cmd")[0]
	const accept = "iptables -I FORWARD -i cni0 -j ACCEPT; iptables -I FORWARD -o cni0 -j ACCEPT"
	l.advises(accept, trust)
	harness.Shell(l, trust)
	l.fails("without rules", dropped...)
	harness.Shell(l, accept)
	l.advises()
	l.fails("with the rules")
	docker.restart()
	l.fails("after a restart of Docker", dropped...)
	l.acceptBridge()
	l.fails("with the rules in DOCKER-USER")
}
