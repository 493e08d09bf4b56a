// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"

	"github.com/podlace/podlace/pkg/bridge"
)

// The check "ports" reports host sides of pods that another program detached from their bridge.
func (n *node) ports() (found []Finding) {
	detached, err := bridge.DetachedPorts(n.host)
	if err != nil {
		found = unknown("the bridge ports of the pods", err)
	}
	bridges := map[string]bool{}
	for _, p := range detached {
		if p.Missing && bridges[p.Bridge] {
			continue
		}
		bridges[p.Bridge] = bridges[p.Bridge] || p.Missing
		found = append(found, detachedPort(p))
	}
	return found
}

func detachedPort(p bridge.DetachedPort) Finding {
	pod := cmp.Or(p.Record.Pod, "container "+p.Record.ContainerID)
	f := Finding{Level: Error, Code: portDetached,
		What:        fmt.Sprintf("%s, the host side of %s, is not a port of %s", p.Interface, pod, p.Bridge),
		Evidence:    fmt.Sprintf("the record of the pod names %s; %s has no bridge", p.Bridge, p.Interface),
		Consequence: "the pod has no network",
		Command:     "podlace reload"}
	switch {
	case p.Missing:
		f.Code = bridgeMissing
		f.What = fmt.Sprintf("the bridge %s is missing", p.Bridge)
		f.Evidence = fmt.Sprintf("the record of %s names %s; the node has no such link", pod, p.Bridge)
		f.Consequence = "the pods of this bridge have no network"
		f.Command = "podlace canary: its ADD makes the bridge again and attaches all pods"
	case p.Master != "":
		f.Level, f.Code = Warning, portMoved
		f.Evidence = fmt.Sprintf("the record of the pod names %s; %s is a port of %s", p.Bridge, p.Interface, p.Master)
		f.Consequence = "the pod has the network of " + p.Master
		f.Command = fmt.Sprintf("ip link set %s master %s; podlace reload", p.Interface, p.Bridge)
	}
	return f
}
