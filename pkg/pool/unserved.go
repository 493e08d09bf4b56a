// SPDX-License-Identifier: Apache-2.0

package pool

import "fmt"

// noteUnsupported notes a key of which no device could be tested here. The entry is well-formed; it is not served, and the others are.
func (r *reader) noteUnsupported(at Place, format string, args ...any) {
	r.unserved = append(r.unserved, Problem{at, fmt.Sprintf(format, args...)})
}

// deviceType reads which devices a resource has.
func (r *reader) deviceType(v value, res *Resource) {
	if !r.is(v, text) {
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

// unsupported reads a selector that nothing here can test. An empty value asks for nothing.
func (r *reader) unsupported(v value, key string) {
	if len(v.items) > 0 || v.kind == text && v.text != "" || v.kind != list && v.kind != text {
		r.noteUnsupported(v.Place, "unsupported: %s", key)
	}
}

// nullOnly reads a field of other programs that has no meaning.
func (r *reader) nullOnly(v value) {
	r.fail(v.Place, "want null, as the SR-IOV network operator writes it")
}

// Unserved returns why nothing of some resources is offered, although their entries are well-formed.
func (c *Config) Unserved() (out []Problem) {
	for _, res := range c.Resources {
		for _, p := range res.Unserved {
			out = append(out, Problem{p.Place, fmt.Sprintf("%s: nothing of resource %s is served", p.Text, res.FullName())})
		}
	}
	return out
}
