// SPDX-License-Identifier: Apache-2.0

package pool

import "fmt"

// noteUnsupported records a valid key that this program cannot test. Its resource is not served; other resources are.
func (r *reader) noteUnsupported(at Place, format string, args ...any) {
	r.unserved = append(r.unserved, Problem{at, fmt.Sprintf(format, args...)})
}

// deviceType reads the device type of a resource.
func (r *reader) deviceType(v value, res *Resource) {
	if !r.hasKind(v, text) {
		return
	}
	switch v.text {
	case "netDevice":
	case "accelerator", "auxNetDevice":
		res.otherType = true
		r.noteUnsupported(v.Place, "unsupported: %s; want netDevice", v.text)
	default:
		r.fail(v.Place, "%+.80q: want netDevice", v.text)
	}
}

// unsupported reads a selector that this program cannot test. An empty value has no effect.
func (r *reader) unsupported(v value, key string) {
	if len(v.items) > 0 || v.kind == text && v.text != "" || v.kind != list && v.kind != text {
		r.noteUnsupported(v.Place, "unsupported: %s", key)
	}
}

// nullOnly reads a key that other programs write as null.
func (r *reader) nullOnly(v value) {
	r.fail(v.Place, "want null, as the SR-IOV network operator writes it")
}

// Unserved returns why valid resources are not offered.
func (c *Config) Unserved() (out []Problem) {
	for _, res := range c.Resources {
		for _, p := range res.Unserved {
			out = append(out, Problem{p.Place, fmt.Sprintf("%s: resource %s is not served", p.Text, res.FullName())})
		}
	}
	return out
}
