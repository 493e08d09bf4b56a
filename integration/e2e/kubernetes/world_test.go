// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const namespace = "matrix"

// netPlace is a network namespace of the cluster, with one address for each address family.
type netPlace struct {
	*sandbox.Pod
	address map[string]string
}

// testWorld is a cluster with the addresses of all clients and servers in the test matrix.
type testWorld struct {
	*testCluster
	places   map[string]*netPlace
	services map[string]map[string]string // name, family: address
	cidrs    map[string][]netip.Prefix    // podCIDRs of each node
}

func familyOf(address string) string {
	if strings.Contains(address, ":") {
		return "6"
	}
	return "4"
}

func byFamily(addresses []string) map[string]string {
	m := map[string]string{}
	for _, a := range addresses {
		m[familyOf(a)] = a
	}
	return m
}

// matrixPods returns a server pod with a hostPort and a client pod for each node.
func matrixPods() (objects []any) {
	objects = append(objects, map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}})
	for _, node := range []string{"1", "2", "3"} {
		for _, kind := range []string{"server", "client"} {
			ports := []any{
				map[string]any{"containerPort": 8080, "protocol": "TCP"},
				map[string]any{"containerPort": 8080, "protocol": "UDP"},
			}
			if kind == "server" {
				for _, p := range ports {
					p.(map[string]any)["hostPort"] = 8081
				}
			}
			objects = append(objects, map[string]any{"apiVersion": "v1", "kind": "Pod",
				"metadata": map[string]any{"name": kind + node, "namespace": namespace, "labels": map[string]any{"app": kind + node}},
				"spec": map[string]any{"nodeName": "node" + node, "terminationGracePeriodSeconds": 1,
					"containers": []any{map[string]any{"name": "a", "image": "podlace.test/busybox:1", "ports": ports}}},
			})
		}
	}
	return objects
}

// matrixServices returns the Services of the matrix; each has one pod. The Service local1 serves only the traffic of its node.
func matrixServices() (objects []any) {
	for i, name := range []string{"server1", "server2", "server3", "client1", "local1"} {
		var ports []any
		for _, protocol := range []string{"TCP", "UDP"} {
			ports = append(ports, map[string]any{"name": strings.ToLower(protocol), "protocol": protocol,
				"port": 80, "targetPort": 8080, "nodePort": 31001 + i})
		}
		app, policy := name, "Cluster"
		if name == "local1" {
			app, policy = "server1", "Local"
		}
		objects = append(objects, map[string]any{"apiVersion": "v1", "kind": "Service",
			"metadata": map[string]any{"name": name, "namespace": namespace},
			"spec": map[string]any{"type": "NodePort", "ipFamilyPolicy": "PreferDualStack", "selector": map[string]any{"app": app},
				"ports": ports, "externalTrafficPolicy": policy}})
	}
	return objects
}

func nodePort(service string) int {
	return map[string]int{"server1": 31001, "server2": 31002, "server3": 31003, "client1": 31004, "local1": 31005}[service]
}

// newWorld starts the pods and Services of the matrix. Servers in each pod and in the machine outside the cluster answer with their name
// and the client's address.
func newWorld(t *testing.T, c *testCluster) *testWorld {
	t.Helper()
	w := &testWorld{testCluster: c, places: map[string]*netPlace{}, services: map[string]map[string]string{},
		cidrs: map[string][]netip.Prefix{}}
	c.applyObjects(t, append(matrixPods(), matrixServices()...)...)
	c.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
	w.addMachines(t)
	w.addCIDRs(t)
	w.addPods(t)
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ ClusterIPs []string }
		}
	}
	c.getObjects(t, &list, "-n", namespace, "services")
	for _, s := range list.Items {
		w.services[s.Metadata.Name] = byFamily(s.Spec.ClusterIPs)
	}
	for name, p := range w.places {
		if !strings.HasPrefix(name, "node") {
			serveName(t, name, p)
		}
	}
	return w
}

func (w *testWorld) addMachines(t *testing.T) {
	t.Helper()
	root, err := os.ReadFile(filepath.Join(w.dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	addresses := map[string][]string{"node1": {"192.0.2.11", "2001:db8::11"}, "node2": {"192.0.2.12", "2001:db8::12"},
		"node3": {"198.51.100.13", "2001:db8:1::13"}, "outside": {"192.0.2.100", "2001:db8::100"}}
	for name, list := range addresses {
		path := fmt.Sprintf("/proc/%s/root/run/netns/%s", strings.TrimSpace(string(root)), name)
		w.places[name] = &netPlace{Pod: &sandbox.Pod{Name: name, Path: path}, address: byFamily(list)}
	}
}

func (w *testWorld) addCIDRs(t *testing.T) {
	t.Helper()
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ PodCIDRs []netip.Prefix }
		}
	}
	w.getObjects(t, &list, "nodes")
	for _, n := range list.Items {
		w.cidrs[n.Metadata.Name] = n.Spec.PodCIDRs
	}
}

// addPods finds each pod's network namespace by its addresses, and stores it in places.
func (w *testWorld) addPods(t *testing.T) {
	t.Helper()
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ NodeName string }
			Status   struct{ PodIPs []struct{ IP string } }
		}
	}
	w.getObjects(t, &list, "-n", namespace, "pods")
	for _, p := range list.Items {
		var addresses []string
		for _, ip := range p.Status.PodIPs {
			addresses = append(addresses, ip.IP)
		}
		if len(addresses) != len(w.families) {
			t.Fatalf("pod %s has the addresses %v, and the cluster has %d families", p.Metadata.Name, addresses, len(w.families))
		}
		path, err := netnsOf("/proc/"+w.machinePID(t, p.Spec.NodeName)+"/root/run/netns", addresses[0])
		if err != nil {
			t.Fatalf("pod %s: %v", p.Metadata.Name, err)
		}
		w.places[p.Metadata.Name] = &netPlace{Pod: &sandbox.Pod{Name: p.Metadata.Name, Path: path}, address: byFamily(addresses)}
	}
}

// netnsOf finds the network namespace with the given address in a folder of namespaces.
func netnsOf(folder, address string) (string, error) {
	files, err := os.ReadDir(folder)
	if err != nil {
		return "", err
	}
	want := netip.MustParseAddr(address)
	for _, f := range files {
		path := filepath.Join(folder, f.Name())
		found := false
		err := (&sandbox.Pod{Name: f.Name(), Path: path}).Do(func() error {
			list, err := net.InterfaceAddrs()
			for _, a := range list {
				if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr() == want {
					found = true
				}
			}
			return err
		})
		if err == nil && found {
			return path, nil
		}
	}
	return "", fmt.Errorf("no network namespace in %s has the address %s", folder, address)
}

// serveName runs a server on port 8080 for TCP and UDP until the end of the test. It answers with its pod's or machine's name and the
// client's address, and then returns all data of a TCP connection.
func serveName(t *testing.T, name string, p *netPlace) {
	t.Helper()
	var tcp net.Listener
	var udp *net.UDPConn
	err := p.Do(func() error {
		var errs [2]error
		tcp, errs[0] = net.Listen("tcp", ":8080")
		udp, errs[1] = net.ListenUDP("udp", &net.UDPAddr{Port: 8080})
		return errors.Join(errs[:]...)
	})
	if err != nil {
		t.Fatalf("serve in %s: %v", name, err)
	}
	t.Cleanup(func() { _ = tcp.Close(); _ = udp.Close() })
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(conn, "%s %s", name, conn.RemoteAddr())
			go func() {
				_, _ = io.Copy(conn, conn)
				_ = conn.Close()
			}()
		}
	}()
	go func() {
		for buf := make([]byte, 64); ; {
			_, from, err := udp.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteToUDPAddrPort(fmt.Appendf(nil, "%s %s", name, from), from)
		}
	}()
}

const (
	dialLimit    = 3 * time.Second
	refusedLimit = 500 * time.Millisecond // timeout of paths that must not work; working paths take some milliseconds
)

// askServer connects to a server, and returns the server's name and the client's address as the server sees it.
func (w *testWorld) askServer(from, network, address string, port int, limit time.Duration) (server string, seen netip.Addr, err error) {
	var conn net.Conn
	err = w.places[from].Do(func() (err error) {
		conn, err = net.DialTimeout(network, net.JoinHostPort(address, fmt.Sprint(port)), limit)
		return err
	})
	if err != nil {
		return "", seen, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(limit))
	buf := make([]byte, 256)
	if network == "udp" {
		if _, err := conn.Write([]byte("?")); err != nil {
			return "", seen, err
		}
	}
	n, err := conn.Read(buf)
	if err != nil && (err != io.EOF || n == 0) {
		return "", seen, err
	}
	server, client, _ := strings.Cut(string(buf[:n]), " ")
	at, err := netip.ParseAddrPort(client)
	return server, at.Addr().Unmap(), err
}
