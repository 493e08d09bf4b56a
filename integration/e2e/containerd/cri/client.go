// SPDX-License-Identifier: Apache-2.0

// Package cri runs pods through a node's container runtime as the kubelet does, and tests their traffic, for containerd and CRI-O.
package cri

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/integration/kerneltest"
)

// HTTPPort is the port of each pod's web server.
const HTTPPort = 8080

// Client is a client of the node's container runtime. Like the kubelet, the client uses the CRI API.
type Client struct {
	api.RuntimeServiceClient
	conn *grpc.ClientConn
}

// Dial connects to the runtime's socket.
func Dial(socket string) (Client, error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return Client{}, fmt.Errorf("dial %s: %w", socket, err)
	}
	return Client{api.NewRuntimeServiceClient(conn), conn}, nil
}

// Open connects a test to the container runtime, or skips it outside a node of package node. State that remains in the node fails the test.
func Open(t *testing.T, socket string) Client {
	t.Helper()
	node.Skip(t)
	c, err := Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.conn.Close() })
	kerneltest.Clean(t)
	return c
}

// PodOption changes the configuration of a pod before the pod runs.
type PodOption func(*api.PodSandboxConfig)

// HostPort maps a port of the node to the pod's web server.
func HostPort(port int32) PodOption { return MapPort(port, HTTPPort) }

// MapPort maps a port of the node to a port of the pod.
func MapPort(host, container int32) PodOption {
	return func(p *api.PodSandboxConfig) {
		p.PortMappings = append(p.PortMappings,
			&api.PortMapping{Protocol: api.Protocol_TCP, ContainerPort: container, HostPort: host})
	}
}

// Limits sets a pod's bandwidth annotations: the limit for traffic to it, and that for traffic from it.
func Limits(to, from string) PodOption {
	return func(p *api.PodSandboxConfig) {
		p.Annotations["kubernetes.io/ingress-bandwidth"] = to
		p.Annotations["kubernetes.io/egress-bandwidth"] = from
	}
}

// PodConfig returns the configuration of a pod sandbox.
func PodConfig(name string, options ...PodOption) *api.PodSandboxConfig {
	p := &api.PodSandboxConfig{
		Metadata: &api.PodSandboxMetadata{
			Name: name, Namespace: "shop", Uid: fmt.Sprintf("%s-%d", name, time.Now().UnixNano()),
		},
		Hostname:     name,
		LogDirectory: "/run/podlogs/" + name,
		Annotations:  map[string]string{},
		Linux: &api.LinuxPodSandboxConfig{
			SecurityContext: &api.LinuxSandboxSecurityContext{
				NamespaceOptions: &api.NamespaceOption{Pid: api.NamespaceMode_CONTAINER},
			},
		},
	}
	for _, o := range options {
		o(p)
	}
	return p
}

// Run runs a sandbox and returns its ID.
func (c Client) Run(ctx context.Context, config *api.PodSandboxConfig) (string, error) {
	r, err := c.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Config: config})
	if err != nil {
		return "", fmt.Errorf("RunPodSandbox %s: %w", config.Metadata.Name, err)
	}
	return r.PodSandboxId, nil
}

// Stop stops a sandbox.
func (c Client) Stop(ctx context.Context, id string) error {
	if _, err := c.StopPodSandbox(ctx, &api.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("StopPodSandbox: %w", err)
	}
	return nil
}

// Remove removes a stopped sandbox.
func (c Client) Remove(ctx context.Context, id string) error {
	if _, err := c.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("RemovePodSandbox: %w", err)
	}
	return nil
}

// RemoveAll removes every sandbox of the node.
func (c Client) RemoveAll(ctx context.Context) error {
	r, err := c.ListPodSandbox(ctx, &api.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("ListPodSandbox: %w", err)
	}
	var errs []error
	for _, s := range r.Items {
		errs = append(errs, c.Stop(ctx, s.Id), c.Remove(ctx, s.Id))
	}
	return errors.Join(errs...)
}

// Ready returns an error unless the runtime has RuntimeReady and NetworkReady, which the kubelet also checks.
func (c Client) Ready(ctx context.Context) error {
	r, err := c.Status(ctx, &api.StatusRequest{})
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	want := map[string]bool{api.RuntimeReady: true, api.NetworkReady: true}
	for _, cond := range r.Status.Conditions {
		if want[cond.Type] && !cond.Status {
			return fmt.Errorf("%s is false: %s %s", cond.Type, cond.Reason, cond.Message)
		}
		delete(want, cond.Type)
	}
	if len(want) > 0 {
		return fmt.Errorf("status without the conditions %v", want)
	}
	return nil
}

// Start runs a shell command as the container of the sandbox.
func (c Client) Start(ctx context.Context, sandbox string, config *api.PodSandboxConfig, script string) (string, error) {
	r, err := c.CreateContainer(ctx, &api.CreateContainerRequest{
		PodSandboxId: sandbox, SandboxConfig: config,
		Config: &api.ContainerConfig{
			Metadata: &api.ContainerMetadata{Name: "main"},
			Image:    &api.ImageSpec{Image: node.Image},
			Command:  []string{"/bin/sh", "-c", script},
			LogPath:  "main.log",
			Linux: &api.LinuxContainerConfig{SecurityContext: &api.LinuxContainerSecurityContext{
				NamespaceOptions: config.Linux.SecurityContext.NamespaceOptions}},
		},
	})
	if err != nil {
		return "", fmt.Errorf("CreateContainer: %w", err)
	}
	if _, err := c.StartContainer(ctx, &api.StartContainerRequest{ContainerId: r.ContainerId}); err != nil {
		return "", fmt.Errorf("StartContainer: %w", err)
	}
	return r.ContainerId, nil
}

// Network contains the addresses and the network namespace that the runtime reports for a sandbox.
type Network struct {
	V4, V6 netip.Addr
	Netns  string
}

// Network returns a sandbox's addresses and network namespace. An address that the runtime does not report is the zero value.
func (c Client) Network(ctx context.Context, sandbox string) (Network, error) {
	r, err := c.PodSandboxStatus(ctx, &api.PodSandboxStatusRequest{PodSandboxId: sandbox, Verbose: true})
	if err != nil {
		return Network{}, fmt.Errorf("PodSandboxStatus: %w", err)
	}
	var texts []string
	if ip := r.Status.Network.GetIp(); ip != "" {
		texts = append(texts, ip)
	}
	for _, more := range r.Status.Network.GetAdditionalIps() {
		texts = append(texts, more.Ip)
	}
	var n Network
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		switch {
		case err != nil:
			return Network{}, fmt.Errorf("PodSandboxStatus: address: %w", err)
		case addr.Is4():
			n.V4 = addr
		default:
			n.V6 = addr
		}
	}
	n.Netns, err = netnsOf(r.Info["info"])
	return n, err
}

// netnsOf finds the network namespace in the OCI specification of a sandbox.
func netnsOf(info string) (string, error) {
	var v struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string }
			}
		}
	}
	if err := json.Unmarshal([]byte(info), &v); err != nil {
		return "", fmt.Errorf("sandbox info: %w", err)
	}
	for _, ns := range v.RuntimeSpec.Linux.Namespaces {
		if ns.Type == "network" {
			return ns.Path, nil
		}
	}
	return "", errors.New("sandbox info: no network namespace")
}

// WarmUp runs and removes one pod, whose ADD creates the node's bridge and static rules before the tests.
func WarmUp(socket string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := Dial(socket)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	if err := Eventually(ctx, 10*time.Second, func() error { return c.Ready(ctx) }); err != nil {
		return err
	}
	if _, err := c.Run(ctx, PodConfig("first", HostPort(18079), Limits("20M", "20M"))); err != nil {
		return err
	}
	return c.RemoveAll(ctx)
}
