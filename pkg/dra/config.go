// SPDX-License-Identifier: Apache-2.0

package dra

import (
	resourceapi "k8s.io/api/resource/v1"

	"github.com/podlace/podlace/pkg/pool"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// configFor returns the settings of the device of a result.
func configFor(*resourceapi.AllocationResult, resourceapi.DeviceRequestAllocationResult, *pool.Resource) (*vfconfig.Config, error) {
	return nil, nil
}
