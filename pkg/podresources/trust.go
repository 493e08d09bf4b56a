// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
	"time"
)

// TrustSuffix follows the path of the device plugin's socket in that of the file which says of which kubelet the checkpoint is to be believed.
const TrustSuffix = ".checkpoint"

// maxTrust is how long that is believed, of a device plugin that looks every ten seconds.
const maxTrust = time.Minute

// Mark names the kubelet that is there now, by its socket, which each one makes anew, and its checkpoint. It is what stands in the file.
func (k Kubelet) Mark() ([]byte, error) {
	mark, _, err := k.mark()
	return mark, err
}

func (k Kubelet) mark() (mark []byte, began time.Time, err error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(k.Socket, &st); err != nil {
		return nil, began, &os.PathError{Op: "lstat", Path: k.Socket, Err: err}
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFSOCK {
		return nil, began, fmt.Errorf("%s is no socket", k.Socket)
	}
	return fmt.Appendf(nil, "%d %d %d\n%s", st.Dev, st.Ino, st.Ctim.Nano(), k.Checkpoint), time.Unix(st.Ctim.Unix()), nil
}

// NoneNoted tells, without asking anybody, that a pod has none of the wanted devices: the kubelet has written down nothing for its UID, which it does
// before the sandbox of a pod is made. That file is no API, and believed where the device plugin wrote into the file trust, in the last minute, that
// it has what this kubelet tells; and only if this kubelet, and not one before it, wrote it last.
func NoneNoted(trust string, k Kubelet, uid string) bool {
	mark, seen, err := readRegular(trust)
	if age := time.Since(seen); err != nil || uid == "" || age < 0 || age > maxTrust {
		return false
	}
	_, checkpoint, _ := bytes.Cut(mark, []byte("\n"))
	k.Checkpoint = string(checkpoint)
	is, began, err := k.mark()
	if err != nil || !bytes.Equal(is, mark) {
		return false
	}
	data, written, err := readRegular(k.Checkpoint)
	if err != nil || written.Before(began) {
		return false
	}
	entries, isKnown := walk(data, uid)
	return isKnown && len(k.wanted(devicesOf(entries))) == 0
}
