// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// cluster contains the input of the scheduler's allocator.
type cluster struct {
	slices  []*resourceapi.ResourceSlice
	classes classes
	taken   sets.Set[structured.DeviceID]
	cache   *cel.Cache
}

func newCluster(c classes, slices []*resourceapi.ResourceSlice) *cluster {
	return &cluster{slices: slices, classes: c, taken: sets.New[structured.DeviceID](), cache: cel.NewCache(100, cel.Features{})}
}

// classes lists DeviceClasses.
type classes []*resourceapi.DeviceClass

// List returns all classes.
func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

// Get returns the class with a name.
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("no class %s", name)
}

// channel is the set of features that selects one of the library's three allocators: stable, incubating and experimental.
type channel struct {
	name     string
	features structured.Features
}

func channels() []channel {
	stable := structured.Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true}
	incubating := stable
	incubating.ConsumableCapacity, incubating.DeviceBindingAndStatus = true, true
	return []channel{{"stable", stable}, {"incubating", incubating}, {"experimental", structured.Features{AdminAccess: true,
		CompatibilityGroups: true, ConsumableCapacity: true, DerivedAttributes: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		ListTypeAttributes: true, OptionalNodeOperations: true, PartitionableDevices: true, PrioritizedList: true}}}
}

// allocator returns the scheduler's allocator for one scheduling cycle.
func (c *cluster) allocator(ctx context.Context, f structured.Features) (structured.Allocator, error) {
	return structured.NewAllocator(ctx, f, structured.AllocatedState{AllocatedDevices: c.taken}, c.classes, c.slices, c.cache)
}

// node returns the Node object of a machine.
func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }
