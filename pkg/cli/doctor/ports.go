// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/podlace/podlace/pkg/bridge"
)

// ports reports host sides of pods that another program deleted or detached from their bridge, and bridges that are down.
func (n *node) ports() []Finding {
	detached, err := bridge.DetachedPorts(n.host)
	found := unknown("the bridge ports of the pods", err)
	bridges := map[string]bool{}
	for _, p := range detached {
		if (p.Missing || p.Down) && bridges[p.Bridge] {
			continue
		}
		bridges[p.Bridge] = bridges[p.Bridge] || p.Missing || p.Down
		found = append(found, detachedPort(p))
	}
	return append(found, n.unrecordedPorts()...)
}

// unrecordedPorts reports Podlace's bridge ports whose attachment records are lost.
func (n *node) unrecordedPorts() []Finding {
	ports, err := bridge.UnrecordedPorts(n.host)
	if err != nil || len(ports) == 0 {
		return unknown("the ports of the bridges", err)
	}
	list := strings.Join(ports[:min(len(ports), maxPodFindings)], " ")
	return []Finding{{Level: Warning, Code: "port-unrecorded", What: fmt.Sprintf("pods without a record: %d", len(ports)),
		Evidence:    "no record in /run/podlace has the interface " + list,
		Consequence: "nothing restores the rules and limits of these pods after a flush, and podlace ls does not list the pods",
		Command:     "delete these pods, so that their controllers create new pods"}}
}

func detachedPort(p bridge.DetachedPort) Finding {
	pod := cmp.Or(p.Record.Pod, "container "+p.Record.ContainerID)
	f := Finding{Level: Error, Code: "port-detached",
		What:        fmt.Sprintf("%s, the host side of %s, is not a port of %s", p.Interface, pod, p.Bridge),
		Evidence:    fmt.Sprintf("the record of the pod names %s; %s has no bridge", p.Bridge, p.Interface),
		Consequence: "the pod has no network",
		Command:     "podlace reload"}
	switch {
	case p.Deleted:
		f.Code = "port-deleted"
		f.What = fmt.Sprintf("%s, the host side of %s, is missing", p.Interface, pod)
		f.Evidence = "the record of the pod names it, and the namespace of the pod exists"
		f.Command = "delete the pod, so that its controller creates a new pod"
	case p.Missing:
		f.Code = "bridge-missing"
		f.What = fmt.Sprintf("the bridge %s is missing", p.Bridge)
		f.Evidence = fmt.Sprintf("the record of %s names %s; the node has no such link", pod, p.Bridge)
		f.Consequence = "the pods of this bridge have no network"
	case p.Down:
		f.Code, f.What = "bridge-down", fmt.Sprintf("the bridge %s is down", p.Bridge)
		f.Evidence = "the record of " + pod + " names it"
		f.Consequence = "the pods of this bridge have no network"
	case p.Master != "":
		f.Level, f.Code = Warning, "port-moved"
		f.Evidence = fmt.Sprintf("the record of the pod names %s; %s is a port of %s", p.Bridge, p.Interface, p.Master)
		f.Consequence = "the pod has the network of " + p.Master
		f.Command = fmt.Sprintf("ip link set %s master %s; podlace reload", p.Interface, p.Bridge)
	}
	return f
}
