// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/podlace/podlace/pkg/podresources"
)

// servicePID returns the process of a program that scripts/node.sh keeps running in the node.
func servicePID(name string) (pid int) {
	data, _ := os.ReadFile("/run/node/" + name + ".pid")
	_, _ = fmt.Sscan(string(data), &pid)
	return pid
}

// allocatableNow is an error unless the kubelet may give away so many devices of the resource slow, whatever the API server knows.
func allocatableNow(want int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	k := podresources.At(kubeletRoot)
	k.Resources = []string{slow}
	devices, err := podresources.Allocatable(ctx, k)
	if err == nil && len(devices) != want {
		err = fmt.Errorf("it may give away %d", len(devices))
	}
	return err
}
