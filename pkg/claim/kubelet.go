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

// stateVersion is the version in the file of kubelets since 1.33. The file is not an API; its source is pkg/kubelet/cm/dra/state of
// Kubernetes.
const stateVersion = "checkpoint.dra.kubelet.k8s.io/v1"

// stateFile returns the kubelet's file of claims. kubelet is its root folder, such as /var/lib/kubelet.
func stateFile(kubelet string) string { return filepath.Join(kubelet, "dra_manager_state") }

// KubeletClaim is a claim in the kubelet's file.
type KubeletClaim struct {
	UID, Namespace, Name string
	Devices              []KubeletDevice // of this driver; empty before the claim is prepared
}

// KubeletDevice is a device of a claim, by its name in the ResourceSlice.
type KubeletDevice struct{ PoolName, DeviceName string }

func (n KubeletClaim) String() string { return "claim " + n.Namespace + "/" + n.Name }

// KubeletClaims returns all claims with devices of this driver. An error means that the claims are unknown. It is fs.ErrNotExist
// (errors.Is) if the kubelet has prepared no claim yet, or has another root folder.
func KubeletClaims(kubelet string) ([]KubeletClaim, error) { return claims(stateFile(kubelet), "") }

// claims returns the claims of a pod that have devices of this driver, or those of all pods if podUID is "". Its errors are those of
// Notes.
func claims(path, podUID string) (of []KubeletClaim, err error) {
	data, err := podresources.ReadRegular(path)
	if err != nil {
		return nil, err
	}
	if of, err = parseState(data, podUID); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return of, nil
}

// parseState reads the kubelet's file: JSON within a JSON string, and the checksum of that string.
func parseState(data []byte, podUID string) (of []KubeletClaim, err error) {
	var outer struct {
		Data     *string
		Checksum *uint32
	}
	if err := json.Unmarshal(data, &outer); err != nil {
		return nil, err
	}
	if outer.Data == nil || outer.Checksum == nil {
		return nil, errors.New("the data or the checksum is missing")
	}
	if sum := crc32.ChecksumIEEE([]byte(*outer.Data)); sum != *outer.Checksum {
		return nil, fmt.Errorf("checksum %d: want %d", *outer.Checksum, sum)
	}
	// Skip parsing if the text does not contain the UID, which JSON never escapes. Hundreds of claims take 100 kB, and most pods have
	// none.
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
			var ofDriver struct{ Devices []KubeletDevice }
			_ = json.Unmarshal(text, &ofDriver) // needed only for unreadable records
			of = append(of, KubeletClaim{c.ClaimUID, c.Namespace, c.ClaimName, ofDriver.Devices})
		}
	}
	return of, nil
}
