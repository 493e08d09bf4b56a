// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
)

// stateVersion is what kubelets since 1.33 write; it is no API. The source is pkg/kubelet/cm/dra/state of Kubernetes.
const stateVersion = "checkpoint.dra.kubelet.k8s.io/v1"

// Note is a claim that the kubelet has written down for pods.
type Note struct {
	UID, Namespace, Name string
	Devices              []NotedDevice // of this driver; none before the claim is prepared
}

// NotedDevice is a device of a claim as a slice names it.
type NotedDevice struct{ PoolName, DeviceName string }

func (n Note) String() string { return "claim " + n.Namespace + "/" + n.Name }

// Notes returns all claims that have devices of this driver. An error means that nothing is known; it is fs.ErrNotExist (errors.Is) if
// the kubelet has prepared no claim yet, or has another root folder.
func Notes(kubelet string) ([]Note, error) { return NewCache("", kubelet).claims("") }

// unwrap returns the text of the kubelet's file: JSON within JSON, beside its checksum.
func unwrap(data []byte) (string, error) {
	var outer struct {
		Data     *string
		Checksum *uint32
	}
	if err := json.Unmarshal(data, &outer); err != nil {
		return "", err
	}
	if outer.Data == nil || outer.Checksum == nil {
		return "", errors.New("it has no data, or no checksum")
	}
	if sum := crc32.ChecksumIEEE([]byte(*outer.Data)); sum != *outer.Checksum {
		return "", fmt.Errorf("checksum %d: want %d", *outer.Checksum, sum)
	}
	return *outer.Data, nil
}

// parseState returns the claims of a pod, or with "" of all pods, that have devices of this driver.
func parseState(text, podUID string) (of []Note, err error) {
	// A UID has nothing that JSON escapes. A node with hundreds of claims has a text of 100 kB, and most pods have none.
	if strings.Contains(text, `"apiVersion":"`+stateVersion+`"`) && !strings.Contains(text, podUID) {
		return nil, nil
	}
	var state struct {
		APIVersion         string `json:"apiVersion"`
		ClaimInfoStateList []json.RawMessage
	}
	if err := json.Unmarshal([]byte(text), &state); err != nil {
		return nil, err
	}
	if state.APIVersion != stateVersion {
		return nil, fmt.Errorf("version %q: want %s", state.APIVersion, stateVersion)
	}
	for _, entry := range state.ClaimInfoStateList {
		if !bytes.Contains(entry, []byte(podUID)) {
			continue
		}
		n, ok, err := parseEntry(entry, podUID)
		if err != nil {
			return nil, err
		}
		if ok {
			of = append(of, n)
		}
	}
	return of, nil
}

// parseEntry returns a claim of the kubelet's file. ok is false if it is not the pod's, or has no device of this driver.
func parseEntry(entry []byte, podUID string) (n Note, ok bool, err error) {
	var c struct {
		ClaimUID, ClaimName, Namespace string
		PodUIDs                        map[string]struct{}
		DriverState                    map[string]json.RawMessage
	}
	if err := json.Unmarshal(entry, &c); err != nil {
		return Note{}, false, err
	}
	if c.ClaimUID == "" || c.ClaimName == "" || c.Namespace == "" {
		return Note{}, false, errors.New("a claim has no UID, name or namespace")
	}
	_, has := c.PodUIDs[podUID]
	devices, ours := c.DriverState[Driver]
	if !ours || !has && podUID != "" {
		return Note{}, false, nil
	}
	var ofDriver struct{ Devices []NotedDevice }
	_ = json.Unmarshal(devices, &ofDriver) // only claims whose records cannot be read need it
	return Note{c.ClaimUID, c.Namespace, c.ClaimName, ofDriver.Devices}, true, nil
}
