// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// TrustSuffix follows the path of the device plugin's socket in that of the file which says which checkpoint of which kubelet is to be believed.
const TrustSuffix = ".checkpoint"

// maxTrust is how long that is believed, of a device plugin that looks every ten seconds.
const maxTrust = time.Minute

// Mark names the kubelet that is there now, by its socket, which each one makes anew, and its checkpoint.
func (k Kubelet) Mark() (string, error) {
	info, err := os.Lstat(k.Socket)
	if err != nil {
		return "", err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return "", fmt.Errorf("%s is no socket", k.Socket)
	}
	return versionOf(info) + "\n" + k.Checkpoint + "\n", nil
}

// Trust is what stands in the file: a mark, a version of the checkpoint that was read after that, and the pods, as namespace/name, of which the kubelet
// told after that that they have devices.
func Trust(mark, version string, pods []string) []byte {
	return []byte(mark + version + "\n" + strings.Join(pods, "\n") + "\n")
}

// versionOf names a file so that one which comes in its place has another name.
func versionOf(info fs.FileInfo) string {
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprint(st.Dev, " ", st.Ino, " ", st.Ctim.Nano(), " ", st.Size)
}

// NoneNoted tells, without asking anybody, that a pod has none of the wanted devices: the kubelet has written down nothing for its UID, which it does
// before the sandbox of a pod is made. That file is no API, and an older state of it may be written over a newer one. So it is believed where the
// device plugin wrote into the file trust, in the last minute, that after it had read this very version of it this kubelet told of no device of a pod of that
// name: devices that are given away later make another version.
func NoneNoted(trust string, k Kubelet, namespace, name, uid string) bool {
	seen, info, err := readRegular(trust)
	if err != nil || uid == "" {
		return false
	}
	if age := time.Since(info.ModTime()); age < 0 || age > maxTrust {
		return false
	}
	_, path, _ := strings.Cut(string(seen), "\n")
	k.Checkpoint, _, _ = strings.Cut(path, "\n")
	mark, err := k.Mark()
	if err != nil {
		return false
	}
	data, info, err := readRegular(k.Checkpoint)
	if err != nil {
		return false
	}
	pods, isSeen := strings.CutPrefix(string(seen), mark+versionOf(info))
	if !isSeen || strings.Contains(pods, "\n"+namespace+"/"+name+"\n") {
		return false
	}
	entries, isKnown := walk(data, func(of []byte) bool { return string(of) == uid })
	return isKnown && !slices.ContainsFunc(entries, func(e entry) bool { return k.Wanted == nil || k.Wanted(e.ResourceName) })
}
