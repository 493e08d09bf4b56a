// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/apis/resource"
	"k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/apis/resource/validation"
)

// apiServer validates new objects like the API server of Kubernetes 1.37, with its defaults and all its rules.
type apiServer struct{ scheme *runtime.Scheme }

func newAPIServer() apiServer {
	s := runtime.NewScheme()
	install.Install(s)
	return apiServer{s}
}

// validateNew sets the defaults of an object, and returns the reasons why the API server would refuse the object.
func (a apiServer) validateNew(object runtime.Object) error {
	a.scheme.Default(object)
	internal, check, err := a.toInternal(object)
	if err != nil {
		return err
	}
	if err := a.scheme.Convert(object, internal, nil); err != nil {
		return err
	}
	errs := check()
	errs = append(errs, a.scheme.Validate(context.Background(), map[string]bool{"DRAPartitionableDevicesType": false}, object)...)
	return errors.Join(errs.ToAggregate())
}

// toInternal returns an object in the API server's internal type, and the validation of this type.
func (a apiServer) toInternal(object runtime.Object) (runtime.Object, func() field.ErrorList, error) {
	switch object.(type) {
	case *resourceapi.ResourceSlice:
		o := &resource.ResourceSlice{}
		return o, func() field.ErrorList { return validation.ValidateResourceSlice(o) }, nil
	case *resourceapi.DeviceClass:
		o := &resource.DeviceClass{}
		return o, func() field.ErrorList { return validation.ValidateDeviceClass(o) }, nil
	case *resourceapi.ResourceClaim:
		o := &resource.ResourceClaim{}
		return o, func() field.ErrorList { return validation.ValidateResourceClaim(o) }, nil
	case *resourceapi.ResourceClaimTemplate:
		o := &resource.ResourceClaimTemplate{}
		return o, func() field.ErrorList { return validation.ValidateResourceClaimTemplate(o) }, nil
	case *resourceapi.DeviceTaintRule:
		o := &resource.DeviceTaintRule{}
		return o, func() field.ErrorList { return validation.ValidateDeviceTaintRule(o) }, nil
	}
	return nil, nil, fmt.Errorf("no validation for %T", object)
}
