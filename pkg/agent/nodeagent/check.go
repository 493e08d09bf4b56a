// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/podlace/podlace/pkg/agent/netcheck"
)

// Objects of conf/cluster/check.yaml, and the port of its servers.
const (
	checkService = "server"
	checkLabel   = "app%3Dpodlace-check"
	checkPort    = 8080
)

// checkWait is how long the servers of all nodes may need to start.
const checkWait = time.Minute

// check holds the flags of podlace-node check.
type check struct {
	node, namespace string
	serve           bool
	hostPort        uint16
	outside         []string
}

func (c *command) newCheck() *cobra.Command {
	var k check
	cmd := &cobra.Command{Use: "check", Short: "Test the connections of a pod, in the Job of conf/cluster/check.yaml", Args: cobra.NoArgs,
		Long: "Test the connections of a pod to the servers of conf/cluster/check.yaml. Exit status 0: all paths work, 1: one fails, 2: not tested.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if k.serve {
				return netcheck.Serve(cmd.Context(), fmt.Sprintf(":%d", checkPort), k.node)
			}
			api, err := client("", "", newConnections())
			if err != nil {
				return err
			}
			cluster, err := k.cluster(cmd.Context(), api)
			if err != nil {
				return err
			}
			if !cluster.Run(cmd.Context(), c.stdout) {
				return exitError(exitProblems)
			}
			return nil
		}}
	f := cmd.Flags()
	f.BoolVar(&k.serve, "serve", false, "answer the test's connections")
	f.StringVar(&k.node, "node-name", os.Getenv("NODE_NAME"), "name of this pod's node")
	f.StringVar(&k.namespace, "namespace", os.Getenv("NAMESPACE"), "namespace of this pod and of the servers")
	f.Uint16Var(&k.hostPort, "host-port", 8479, "hostPort of the servers")
	f.StringSliceVar(&k.outside, "outside", nil, "addresses outside the cluster, with TCP ports; empty: none is tested")
	return cmd
}

// cluster reads what is to be tested from the API server, once the servers of all nodes are ready or checkWait has passed.
func (k check) cluster(ctx context.Context, api rest.Interface) (c netcheck.Cluster, err error) {
	c = netcheck.Cluster{Node: k.node, Name: checkService, Port: checkPort, HostPort: k.hostPort, Patience: 10 * time.Second}
	for _, text := range k.outside {
		at, err := netip.ParseAddrPort(text)
		if err != nil {
			return c, fmt.Errorf("--outside %q: want an address and a port, such as 192.0.2.1:443 or [2001:db8::1]:443", text)
		}
		c.Outside = append(c.Outside, at)
	}
	_ = wait.PollUntilContextTimeout(ctx, time.Second, checkWait, true, func(context.Context) (ready bool, _ error) {
		c.Servers, c.Nodes, err = k.servers(ctx, api)
		waits := slices.ContainsFunc(c.Servers, func(s netcheck.Server) bool { return s.NotReady })
		return err == nil && c.Nodes > 0 && len(c.Servers) >= c.Nodes && !waits, nil
	})
	var service struct {
		Spec struct{ ClusterIPs []netip.Addr }
	}
	if err == nil {
		err = k.get(ctx, api, "/api/v1", "services/"+checkService, &service)
	}
	c.Service = service.Spec.ClusterIPs
	switch {
	case err != nil:
		err = fmt.Errorf("read the pods, the DaemonSet and the Service of namespace %q: %w", k.namespace, err)
	case len(c.Servers) == 0:
		err = errors.New("no server: apply conf/cluster/check.yaml as a whole")
	}
	return c, err
}

// servers returns the pods of the DaemonSet, and how many nodes should have one or 0 if that is not known yet.
func (k check) servers(ctx context.Context, api rest.Interface) (list []netcheck.Server, nodes int, err error) {
	type ip struct{ IP netip.Addr }
	var pods struct {
		Items []struct {
			Spec   struct{ NodeName string }
			Status struct {
				HostIPs, PodIPs []ip
				Conditions      []struct{ Type, Status string }
			}
		}
	}
	var set struct {
		Status struct{ DesiredNumberScheduled int }
	}
	err = errors.Join(k.get(ctx, api, "/api/v1", "pods?labelSelector="+checkLabel, &pods),
		k.get(ctx, api, "/apis/apps/v1", "daemonsets/"+checkService, &set))
	for _, p := range pods.Items {
		s := netcheck.Server{Node: p.Spec.NodeName, NotReady: true}
		for _, a := range p.Status.PodIPs {
			s.IPs = append(s.IPs, a.IP)
		}
		for _, a := range p.Status.HostIPs {
			s.NodeIPs = append(s.NodeIPs, a.IP)
		}
		for _, c := range p.Status.Conditions {
			s.NotReady = s.NotReady && (c.Type != "Ready" || c.Status != "True")
		}
		list = append(list, s)
	}
	return list, set.Status.DesiredNumberScheduled, err
}

// get reads an object of the namespace.
func (k check) get(ctx context.Context, api rest.Interface, version, path string, into any) error {
	request := api.Get().RequestURI(version+"/namespaces/"+k.namespace+"/"+path).SetHeader("Accept", "application/json")
	data, err := request.Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	return err
}
