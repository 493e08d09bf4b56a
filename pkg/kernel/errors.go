// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// MissingFeature is the error for a feature that the kernel lacks.
type MissingFeature struct {
	What string // with the kernel configuration options
	Err  error  // the kernel's reply
}

func (e *MissingFeature) Error() string {
	return fmt.Sprintf("the kernel has no %s: %v", e.What, e.Err)
}

// Unwrap returns the kernel's error.
func (e *MissingFeature) Unwrap() error { return e.Err }

// MissingFeature returns the name of the feature.
func (e *MissingFeature) MissingFeature() string { return e.What }

// missingFeature converts ENOENT, the kernel's error for an unknown kind of object, to a *MissingFeature.
func missingFeature(err error, what string) error {
	if errors.Is(err, unix.ENOENT) {
		return &MissingFeature{what, err}
	}
	return err
}
