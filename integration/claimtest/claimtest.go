// SPDX-License-Identifier: Apache-2.0

// Package claimtest writes dra_manager_state, the kubelet's file of prepared claims, for tests.
package claimtest

import (
	"encoding/json"
	"hash/crc32"
	"os"
	"path/filepath"
)

// Claim is one claim in the kubelet's file.
type Claim struct {
	UID, Namespace, Name string
	Pods                 []string // UIDs of the pods that use the claim
	Devices              []Device
}

// Device is one device of a claim in the kubelet's file.
type Device struct {
	PoolName, DeviceName string
}

type object = map[string]any

// WriteState writes dra_manager_state with claims of the driver sriov.podlace.io into the kubelet's root folder. The format is that of
// pkg/cli/kubelet/cm/dra/state in Kubernetes.
func WriteState(kubelet string, claims ...Claim) error {
	list := make([]object, 0, len(claims))
	for _, c := range claims {
		pods := object{}
		for _, uid := range c.Pods {
			pods[uid] = object{}
		}
		list = append(list, object{"ClaimUID": c.UID, "ClaimName": c.Name, "Namespace": c.Namespace, "PodUIDs": pods,
			"DriverState": object{"sriov.podlace.io": object{"Devices": c.Devices}}})
	}
	text, err := json.Marshal(object{"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "ClaimInfoStateList": list})
	if err != nil {
		return err
	}
	return WriteText(kubelet, string(text))
}

// WriteText writes dra_manager_state with a text and its checksum.
func WriteText(kubelet, text string) error {
	data, err := json.Marshal(object{"Data": text, "Checksum": crc32.ChecksumIEEE([]byte(text))})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(kubelet, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(kubelet, "dra_manager_state"), data, 0o600)
}
