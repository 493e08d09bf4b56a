// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"strings"
	"testing"
)

// TestReadAtMost checks that readAtMost returns an error for a text that is too long, instead of cutting it off.
func TestReadAtMost(t *testing.T) {
	for text, fails := range map[string]bool{"": false, "12345678": false, "123456789": true} {
		data, err := readAtMost(strings.NewReader(text), 8)
		if (err != nil) != fails || err == nil && string(data) != text {
			t.Errorf("%s: %q, %v", text, data, err)
		}
	}
}
