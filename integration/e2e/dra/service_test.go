// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"fmt"
	"os"
)

// servicePID returns the process of a program that scripts/node.sh keeps running in the node.
func servicePID(name string) (pid int) {
	data, _ := os.ReadFile("/run/node/" + name + ".pid")
	_, _ = fmt.Sscan(string(data), &pid)
	return pid
}
