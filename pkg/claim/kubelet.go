// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/podresources"
)

// stateVersion is what kubelets since 1.33 write; it is no API. The source is pkg/kubelet/cm/dra/state of Kubernetes.
const stateVersion = "checkpoint.dra.kubelet.k8s.io/v1"

// State file of a kubelet with a root folder, such as /var/lib/kubelet.
func stateFile(kubelet string) string { return filepath.Join(kubelet, "dra_manager_state") }

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
func Notes(kubelet string) ([]Note, error) { return claims(stateFile(kubelet), "") }

// claims returns the claims of a pod, or with "" of all pods, that have devices of this driver. An error means that nothing can be said; it
// is fs.ErrNotExist (errors.Is) if the kubelet has prepared no claim yet.
func claims(path, podUID string) (of []Note, err error) {
	data, err := podresources.ReadRegular(path)
	if err != nil {
		return nil, err
	}
	if of, err = parseState(data, podUID); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return of, nil
}

// parseState reads the kubelet's file: a text of JSON within JSON, and the checksum of the text.
func parseState(data []byte, podUID string) (of []Note, err error) {
	var outer struct {
		Data     *string
		Checksum *uint32
	}
	if err := json.Unmarshal(data, &outer); err != nil {
		return nil, err
	}
	if outer.Data == nil || outer.Checksum == nil {
		return nil, errors.New("it has no data, or no checksum")
	}
	if sum := crc32.ChecksumIEEE([]byte(*outer.Data)); sum != *outer.Checksum {
		return nil, fmt.Errorf("checksum %d: want %d", *outer.Checksum, sum)
	}
	// A UID has nothing that JSON escapes. A node with hundreds of claims has a text of 100 kB, and most pods have none.
	if strings.Contains(*outer.Data, `"apiVersion":"`+stateVersion+`"`) && !strings.Contains(*outer.Data, podUID) {
		return nil, nil
	}
	var state struct {
		APIVersion         string `json:"apiVersion"`
		ClaimInfoStateList []struct {
			ClaimUID, ClaimName, Namespace string
			PodUIDs                        map[string]struct{}
			DriverState                    map[string]json.RawMessage
		}
	}
	if err := json.Unmarshal([]byte(*outer.Data), &state); err != nil {
		return nil, err
	}
	if state.APIVersion != stateVersion {
		return nil, fmt.Errorf("version %q: want %s", state.APIVersion, stateVersion)
	}
	for _, c := range state.ClaimInfoStateList {
		if c.ClaimUID == "" || c.ClaimName == "" || c.Namespace == "" {
			return nil, errors.New("a claim has no UID, name or namespace")
		}
		_, has := c.PodUIDs[podUID]
		if text, ours := c.DriverState[Driver]; (has || podUID == "") && ours {
			var ofDriver struct{ Devices []NotedDevice }
			_ = json.Unmarshal(text, &ofDriver) // only claims whose records cannot be read need it
			of = append(of, Note{c.ClaimUID, c.Namespace, c.ClaimName, ofDriver.Devices})
		}
	}
	return of, nil
}
