// SPDX-License-Identifier: Apache-2.0

package pool

import "fmt"

// noteUnsupported records that the current resource has a valid key that Podlace does not support. Podlace does not offer a resource with
// such a key. The other resources are offered as usual.
func (r *reader) noteUnsupported(at Place, format string, args ...any) {
	r.unserved = append(r.unserved, Problem{at, fmt.Sprintf(format, args...)})
}

// readDeviceType reads the key deviceType of a resource.
func (r *reader) readDeviceType(v value, res *Resource) {
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

// readUnsupported reads an unsupported key in a selector. An empty value of an unsupported key has no effect.
func (r *reader) readUnsupported(v value, key string) {
	if len(v.items) > 0 || v.kind == text && v.text != "" || v.kind != list && v.kind != text {
		r.noteUnsupported(v.Place, "unsupported: %s", key)
	}
}

// readNull reads a key whose only valid value is null. Other programs write the value null for this key.
func (r *reader) readNull(v value) {
	r.fail(v.Place, "want null, as the SR-IOV network operator writes it")
}

// Unserved returns, for each valid resource that is not offered, the reason.
func (c *Config) Unserved() (out []Problem) {
	for _, res := range c.Resources {
		for _, p := range res.Unserved {
			out = append(out, Problem{p.Place, fmt.Sprintf("%s: resource %s is not served", p.Text, res.FullName())})
		}
	}
	return out
}
