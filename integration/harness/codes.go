// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// Error codes of the CNI specification (section "Error") or of docs/dev/ARCHITECTURE.md.
const (
	CodeVersion   = 1
	CodeEnv       = 4
	CodeDiffers   = 100
	CodeExhausted = 101
	CodeTaken     = 102
	CodeIO        = 5
	CodeDecode    = 6
	CodeConfig    = 7
	CodeNetns     = 8
	CodeTryAgain  = 11
)

// OldestOf returns the oldest CNI version that a plugin supports.
func OldestOf(plugin string) string {
	if plugin == "bandwidth" || plugin == "podlace-pod" {
		return "0.3.0"
	}
	return "0.1.0"
}

// AllVersions returns the CNI versions in ascending order.
func AllVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

// Coded returns nil without an error or for a valid error document of a plugin. A document with the code of an internal defect, for
// example, is not valid.
func Coded(err error) error {
	var doc *types.Error
	if err == nil || errors.As(err, &doc) && doc.Code != 0 && doc.Code != 999 && doc.Msg != "" && !strings.Contains(doc.Msg, "goroutine ") {
		return nil
	}
	return fmt.Errorf("no error with a valid code: %w", err)
}
