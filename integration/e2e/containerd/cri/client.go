// SPDX-License-Identifier: Apache-2.0

package containerd_test

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
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

const (
	socket   = "unix:///run/containerd/containerd.sock"
	httpPort = 8080
)

// runtimeClient is the node's containerd, spoken to as the kubelet does.
type runtimeClient struct {
	cri.RuntimeServiceClient
	conn *grpc.ClientConn
}

func dialRuntime() (runtimeClient, error) {
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return runtimeClient{}, fmt.Errorf("dial %s: %w", socket, err)
	}
	return runtimeClient{cri.NewRuntimeServiceClient(conn), conn}, nil
}

// openRuntime gives the test the node's containerd, or skips the test when
// there is no node. The test fails if it leaves anything in the node.
func openRuntime(t *testing.T) runtimeClient {
	t.Helper()
	node.Skip(t)
	c, err := dialRuntime()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.conn.Close() })
	kerneltest.Clean(t)
	return c
}

// podOption changes the configuration of a pod before it is run.
type podOption func(*cri.PodSandboxConfig)

// hostPort maps a port of the node to the pod's web server.
func hostPort(port int32) podOption { return mapPort(port, httpPort) }

func mapPort(host, container int32) podOption {
	return func(p *cri.PodSandboxConfig) {
		p.PortMappings = append(p.PortMappings,
			&cri.PortMapping{Protocol: cri.Protocol_TCP, ContainerPort: container, HostPort: host})
	}
}

// limits sets the bandwidth annotations; to and from are the pod's directions.
func limits(to, from string) podOption {
	return func(p *cri.PodSandboxConfig) {
		p.Annotations["kubernetes.io/ingress-bandwidth"] = to
		p.Annotations["kubernetes.io/egress-bandwidth"] = from
	}
}

func podConfig(name string, options ...podOption) *cri.PodSandboxConfig {
	p := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{
			Name: name, Namespace: "shop", Uid: fmt.Sprintf("%s-%d", name, time.Now().UnixNano()),
		},
		Hostname:     name,
		LogDirectory: "/run/podlogs/" + name,
		Annotations:  map[string]string{},
		Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: &cri.LinuxSandboxSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
			},
		},
	}
	for _, o := range options {
		o(p)
	}
	return p
}

// run runs a sandbox and returns its ID.
func (c runtimeClient) run(ctx context.Context, config *cri.PodSandboxConfig) (string, error) {
	r, err := c.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		return "", fmt.Errorf("RunPodSandbox %s: %w", config.Metadata.Name, err)
	}
	return r.PodSandboxId, nil
}

func (c runtimeClient) stop(ctx context.Context, id string) error {
	if _, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("StopPodSandbox: %w", err)
	}
	return nil
}

func (c runtimeClient) remove(ctx context.Context, id string) error {
	if _, err := c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("RemovePodSandbox: %w", err)
	}
	return nil
}

// removeAll removes every sandbox of the node.
func (c runtimeClient) removeAll(ctx context.Context) error {
	r, err := c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("ListPodSandbox: %w", err)
	}
	var errs []error
	for _, s := range r.Items {
		errs = append(errs, c.stop(ctx, s.Id), c.remove(ctx, s.Id))
	}
	return errors.Join(errs...)
}

// ready is an error unless the runtime and its network are ready; the kubelet
// looks at these two conditions alone.
func (c runtimeClient) ready(ctx context.Context) error {
	r, err := c.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	want := map[string]bool{cri.RuntimeReady: true, cri.NetworkReady: true}
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

// start runs a shell command as the container of the sandbox.
func (c runtimeClient) start(ctx context.Context, sandbox string, config *cri.PodSandboxConfig, script string) (string, error) {
	r, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId: sandbox, SandboxConfig: config,
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "main"},
			Image:    &cri.ImageSpec{Image: node.Image},
			Command:  []string{"/bin/sh", "-c", script},
			LogPath:  "main.log",
			Linux:    &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{}},
		},
	})
	if err != nil {
		return "", fmt.Errorf("CreateContainer: %w", err)
	}
	if _, err := c.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: r.ContainerId}); err != nil {
		return "", fmt.Errorf("StartContainer: %w", err)
	}
	return r.ContainerId, nil
}

// network is what the runtime says of a sandbox's network.
type network struct {
	v4, v6 netip.Addr
	netns  string
}

func (c runtimeClient) network(ctx context.Context, sandbox string) (network, error) {
	r, err := c.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: sandbox, Verbose: true})
	if err != nil {
		return network{}, fmt.Errorf("PodSandboxStatus: %w", err)
	}
	texts := []string{r.Status.Network.GetIp()}
	for _, more := range r.Status.Network.GetAdditionalIps() {
		texts = append(texts, more.Ip)
	}
	var n network
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		switch {
		case err != nil:
			return network{}, fmt.Errorf("PodSandboxStatus: address: %w", err)
		case addr.Is4():
			n.v4 = addr
		default:
			n.v6 = addr
		}
	}
	n.netns, err = netnsOf(r.Info["info"])
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

// warmUp runs the node's first pod and removes it.
func warmUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := dialRuntime()
	if err != nil {
		return err
	}
	defer c.conn.Close()
	if err := eventually(ctx, 5*time.Second, func() error { return c.ready(ctx) }); err != nil {
		return err
	}
	if _, err := c.run(ctx, podConfig("first", hostPort(18079), limits("20M", "20M"))); err != nil {
		return err
	}
	return c.removeAll(ctx)
}
