// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/podlace/podlace/pkg/child"
)

// Program asks the kubelet in place of the device plugin. It links gRPC, without which the sriov plugin starts faster.
const Program = "podlace-podresources"

// killAfter is the time beyond its deadline in which the program must start and write its answer, also on a busy node.
const killAfter = 3 * time.Second

// KubeletQuestion is what Program reads from standard input; it writes an Answer to standard output.
type KubeletQuestion struct {
	Question
	Folder  string        `json:"folder"`  // root folder of the kubelet
	InUse   bool          `json:"inUse"`   // pods of the node may get devices through claims
	Timeout time.Duration `json:"timeout"` // in nanoseconds
}

// AskKubelet starts Program from the first folder that has it, and returns the devices of a pod except those of claims.
func AskKubelet(dirs []string, q KubeletQuestion) ([]Device, error) {
	var stdin bytes.Buffer
	if err := write(&stdin, q); err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		a, err := run(filepath.Join(dir, Program), stdin.Bytes(), q.Timeout+killAfter)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		return a.Devices, errors.Join(err, a.err())
	}
	return nil, fmt.Errorf("%w: it is in none of the folders %q of CNI_PATH", ErrNoProgram, dirs)
}

func run(path string, stdin []byte, timeout time.Duration) (a Answer, err error) {
	var stdout, stderr child.Buffer
	cmd := exec.Command(path)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = []string{}, bytes.NewReader(stdin), &stdout, &stderr
	if err := child.Run(cmd, timeout, nil); err != nil {
		return a, fmt.Errorf("%s: %w %.200s", path, err, stderr.String())
	}
	if err := read(&stdout, &a); err != nil {
		return Answer{}, fmt.Errorf("%s: %w", path, err)
	}
	return a, nil
}
