// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/podlace/podlace/pkg/daemon/podresources"
)

// servicePID returns the process ID of a program that scripts/node.sh restarts whenever it ends.
func servicePID(name string) (pid int) {
	data, _ := os.ReadFile("/run/node/" + name + ".pid")
	_, _ = fmt.Sscan(string(data), &pid)
	return pid
}

// allocatableNow returns an error unless the kubelet has exactly want allocatable devices of example.com/slow. It asks the kubelet, because
// the API server may lag behind.
func allocatableNow(want int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	k := podresources.At(kubeletRoot)
	k.Resources = []string{slow}
	devices, _, err := podresources.Allocatable(ctx, k)
	if err == nil && len(devices) != want {
		err = fmt.Errorf("the kubelet has %d allocatable devices", len(devices))
	}
	return err
}
