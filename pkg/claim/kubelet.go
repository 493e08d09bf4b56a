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

// stateVersion is the format version of the kubelet's file since Kubernetes 1.33. The format is no public API;
// pkg/cli/kubelet/cm/dra/state of Kubernetes defines it.
const stateVersion = "checkpoint.dra.kubelet.k8s.io/v1"

// KubeletClaim is a claim in the kubelet's file.
type KubeletClaim struct {
	UID, Namespace, Name string
	Devices              []KubeletDevice // of this driver; empty before the claim is prepared
}

// KubeletDevice is a device of a claim, by its name in the ResourceSlice.
type KubeletDevice struct{ PoolName, DeviceName string }

func (n KubeletClaim) String() string { return "claim " + n.Namespace + "/" + n.Name }

// KubeletClaims returns all claims that have devices of this driver. An error means that they are unknown; it is fs.ErrNotExist
// (errors.Is) if the kubelet has not prepared a claim yet, or has another root folder.
func KubeletClaims(kubelet string) ([]KubeletClaim, error) { return NewCache("", kubelet).claimsOf("") }

// unwrap returns the JSON text that the kubelet's file contains as a string, and verifies its checksum.
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

// parseState returns the claims with devices of this driver of a pod, or of all pods if podUID is "".
func parseState(text, podUID string) (of []KubeletClaim, err error) {
	// Searching for the UID saves parsing up to 100 kB of JSON for the many pods without a claim. It is safe because JSON never escapes
	// the characters of a UID.
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

// parseEntry parses the entry of one claim. ok is false if the claim is not the pod's or has no device of this driver.
func parseEntry(entry []byte, podUID string) (n KubeletClaim, ok bool, err error) {
	var c struct {
		ClaimUID, ClaimName, Namespace string
		PodUIDs                        map[string]struct{}
		DriverState                    map[string]json.RawMessage
	}
	if err := json.Unmarshal(entry, &c); err != nil {
		return KubeletClaim{}, false, err
	}
	if c.ClaimUID == "" || c.ClaimName == "" || c.Namespace == "" {
		return KubeletClaim{}, false, errors.New("a claim has no UID, name or namespace")
	}
	_, has := c.PodUIDs[podUID]
	devices, ours := c.DriverState[Driver]
	if !ours || !has && podUID != "" {
		return KubeletClaim{}, false, nil
	}
	var ofDriver struct{ Devices []KubeletDevice }
	_ = json.Unmarshal(devices, &ofDriver) // only claims whose records are unreadable or lost need it
	return KubeletClaim{c.ClaimUID, c.Namespace, c.ClaimName, ofDriver.Devices}, true, nil
}
