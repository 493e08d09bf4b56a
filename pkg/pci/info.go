// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"encoding/json"
	"strings"
)

// infoVersion is the version of k8snetworkplumbingwg/device-info-spec.
const infoVersion = "1.1.0"

type deviceInfo struct {
	Type    string `json:"type"`
	Version string `json:"version"`
	PCI     struct {
		Address   string `json:"pci-address"`
		VhostNet  string `json:"vhost-net,omitempty"`
		RDMA      string `json:"rdma-device,omitempty"`
		PFAddress string `json:"pf-pci-address,omitempty"`
	} `json:"pci"`
}

// Info returns the device as a document of the device information specification. vhostNet is the path of the vhost-net device, or "".
func (d Device) Info(vhostNet string) []byte {
	info := deviceInfo{Type: "pci", Version: infoVersion}
	info.PCI.Address, info.PCI.VhostNet, info.PCI.RDMA = d.Address.String(), vhostNet, strings.Join(d.RDMA, ",")
	if d.PF.IsValid() {
		info.PCI.PFAddress = d.PF.String()
	}
	data, _ := json.Marshal(info) // strings
	return data
}
