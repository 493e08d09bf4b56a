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

// allocatorInput contains the input of the scheduler's allocator: slices, classes and allocated devices.
type allocatorInput struct {
	slices  []*resourceapi.ResourceSlice
	classes classList
	taken   sets.Set[structured.DeviceID]
	cache   *cel.Cache
}

func newCluster(c classList, slices []*resourceapi.ResourceSlice) *allocatorInput {
	return &allocatorInput{slices: slices, classes: c, taken: sets.New[structured.DeviceID](), cache: cel.NewCache(100, cel.Features{})}
}

// classList lets the allocator read DeviceClasses through List and Get.
type classList []*resourceapi.DeviceClass

// List returns all classes.
func (c classList) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

// Get returns the DeviceClass with the given name.
func (c classList) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("no class %s", name)
}

// allocatorVariant is a set of feature gates, which selects one of the library's allocators: stable, incubating or experimental.
type allocatorVariant struct {
	name     string
	features structured.Features
}

func channels() []allocatorVariant {
	stable := structured.Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true}
	incubating := stable
	incubating.ConsumableCapacity, incubating.DeviceBindingAndStatus = true, true
	return []allocatorVariant{{"stable", stable}, {"incubating", incubating}, {"experimental", structured.Features{AdminAccess: true,
		CompatibilityGroups: true, ConsumableCapacity: true, DerivedAttributes: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		ListTypeAttributes: true, OptionalNodeOperations: true, PartitionableDevices: true, PrioritizedList: true}}}
}

// allocator returns a new allocator, like that of a scheduling cycle.
func (c *allocatorInput) allocator(ctx context.Context, f structured.Features) (structured.Allocator, error) {
	return structured.NewAllocator(ctx, f, structured.AllocatedState{AllocatedDevices: c.taken}, c.classes, c.slices, c.cache)
}

// newNode returns the Kubernetes Node object of a machine.
func newNode(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}
