// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import "strings"

// netPath is a path from a client to a server, used over IPv4 and IPv6, with TCP and with UDP. docs/CLUSTER.md has all of them in the table
// of source addresses.
type netPath struct {
	client, target string // names in the table
	from           string // place
	to             string // place whose address the client dials, "loopback", or the service of a ClusterIP
	port           int
	server         string // place that must answer
	seen           string // the client as the server must see it: a place, or a gateway (a node's address on its pods' bridge)
}

const (
	podPort, servicePort, hostPort = 8080, 80, 8081

	pod, node, machine = "a pod", "a node", "a machine outside"
)

// clusterSetup contains the cluster settings that change the results of the paths.
type clusterSetup struct {
	proxy         string // mode of kube-proxy
	masqueradeAll bool   // of kube-proxy
	crio          bool   // node3 runs CRI-O
}

// allPaths returns the paths of Kubernetes' network model, of Services and of hostPorts.
func (s clusterSetup) allPaths() []netPath {
	all := append(podPaths(), servicePaths()...)
	all = append(append(all, nodePortPaths()...), hostPortPaths("1", "2")...)
	if s.crio {
		all = append(all, hostPortPaths("3", "1")...)
	}
	return all
}

func podPaths() []netPath {
	return []netPath{
		{pod, "another pod of the same node", "client1", "server1", podPort, "server1", "client1"},
		{pod, "a pod of another node", "client1", "server2", podPort, "server2", "client1"},
		{pod, "a pod of a node in another subnet", "client1", "server3", podPort, "server3", "client1"},
		{"a pod of a node in another subnet", pod, "client3", "server1", podPort, "server1", "client3"},
		{node, "a pod of the same node", "node1", "server1", podPort, "server1", "gateway1"},
		{node, "a pod of another node", "node1", "server2", podPort, "server2", "node1"},
		{node, "a pod of a node in another subnet", "node1", "server3", podPort, "server3", "tunnel1"},
		{pod, machine, "client1", "outside", podPort, "outside", "node1"},
	}
}

func servicePaths() []netPath {
	return []netPath{
		{pod, "a ClusterIP whose backend is on the same node", "client1", "service/server1", servicePort, "server1", "client1"},
		{pod, "a ClusterIP whose backend is on another node", "client1", "service/server2", servicePort, "server2", "client1"},
		{pod, "a ClusterIP whose backend is in another subnet", "client1", "service/server3", servicePort, "server3", "client1"},
		{pod, "a ClusterIP whose backend is the pod itself", "client1", "service/client1", servicePort, "client1", "gateway1"},
		{node, "a ClusterIP whose backend is on the same node", "node1", "service/server1", servicePort, "server1", "gateway1"},
		{node, "a ClusterIP whose backend is on another node", "node1", "service/server2", servicePort, "server2", "node1"},
	}
}

// nodePortPaths returns the paths to NodePorts, those named "Local" to Services with externalTrafficPolicy: Local.
func nodePortPaths() []netPath {
	server1, local1 := nodePort("server1"), nodePort("local1")
	return []netPath{
		{machine, "a NodePort of a node that has the backend", "outside", "node1", server1, "server1", "gateway1"},
		{machine, "a NodePort whose backend is on another node", "outside", "node1", nodePort("server2"), "server2", "node1"},
		{pod, "a NodePort of the same node", "client1", "node1", server1, "server1", "gateway1"},
		{pod, "a NodePort of the same node, whose backend is the pod itself", "client1", "node1", nodePort("client1"), "client1", "gateway1"},
		{pod, "a NodePort of another node, whose backend is on the pod's node", "client1", "node2", server1, "server1", "node2"},
		{node, "a NodePort at an address of the same node", "node1", "node1", server1, "server1", "gateway1"},
		{node, "a NodePort at the node's loopback address", "node1", "loopback", server1, "server1", "gateway1"},
		{machine, "a Local NodePort of a node that has the backend", "outside", "node1", local1, "server1", "outside"},
		{machine, "a Local NodePort of a node without a backend", "outside", "node2", local1, "", ""},
		{pod, "a Local NodePort of the same node, which has the backend", "client1", "node1", local1, "server1", "client1"},
		{pod, "a Local NodePort of the same node, which has no backend", "client2", "node2", local1, "server1", "client2"},
		{pod, "a Local NodePort of another node, which has the backend", "client2", "node1", local1, "server1", "node2"},
		{pod, "a Local NodePort of another node, which has no backend", "client1", "node2", local1, "", ""},
	}
}

// hostPortPaths returns the paths to the hostPort of a node, and a path from the node's own server pod to the hostPort of another node.
func hostPortPaths(n, other string) []netPath {
	at, client, server := "node"+n, "client"+n, "server"+n
	return []netPath{
		{machine, "a hostPort", "outside", at, hostPort, server, "outside"},
		{node, "a hostPort at an address of the same node", at, at, hostPort, server, at},
		{node, "a hostPort at the node's loopback address", at, "loopback", hostPort, server, "gateway" + n},
		{"another node", "a hostPort", "node" + other, at, hostPort, server, "node" + other},
		{pod, "a hostPort of the same node", client, at, hostPort, server, client},
		{pod, "the pod's own hostPort", server, at, hostPort, server, "gateway" + n},
		{pod, "a hostPort of another node", client, "node" + other, hostPort, "server" + other, at},
	}
}

// isProxied reports whether the path passes through kube-proxy.
func (p netPath) isProxied() bool { return p.port != podPort && p.port != hostPort }

// nodeNumber returns the number of a node, or of the node of a pod.
func nodeNumber(place string) string { return strings.TrimLeft(place, "abcdefghijklmnopqrstuvwxyz") }

// expectedSource returns the client's address as the server must see it, or the reason why the path must not work.
func (p netPath) expectedSource(s clusterSetup, family string) (seen, refused string) {
	crio := s.crio && p.server == "server3" && p.port == hostPort
	switch {
	case p.server == "":
		return "", "the node has no backend"
	case crio && p.to == "loopback":
		return "", "CRI-O maps no hostPort there"
	case crio && p.from == p.server && s.proxy == "iptables":
		return "", "CRI-O's rule for a pod's own hostPort does not match"
	case p.to == "loopback" && p.port == hostPort && family == "6":
		return "", "there is no route_localnet for IPv6"
	case p.to == "loopback" && p.port != hostPort && (s.proxy == "nftables" || family == "6"):
		return "", "kube-proxy serves no NodePort there"
	case s.masqueradeAll && strings.HasPrefix(p.to, "service/") && p.seen == p.from:
		return p.masqueradeAddress(), ""
	}
	return p.seen, ""
}

// masqueradeAddress returns the address of the link through which the node sends packets to the server.
func (p netPath) masqueradeAddress() string {
	from, to := nodeNumber(p.from), nodeNumber(p.server)
	switch {
	case from == to:
		return "gateway" + from
	case to == "3":
		return "tunnel" + from
	}
	return "node" + from
}
