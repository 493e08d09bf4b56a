// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"

	"github.com/podlace/podlace/pkg/strict"
)

func (r *reader) readDeviceType(v strict.Value, res *Resource) {
	if res.otherType = v.Data == "accelerator" || v.Data == "auxNetDevice"; res.otherType {
		r.unserved.Note(v.Place, "unsupported: %s; want netDevice", v.Data)
		return
	}
	strict.To(r.Report, new(string), strict.OneOf("netDevice"))(v)
}

// readUnsupported reads an unsupported key in a selector. An empty value of an unsupported key has no effect.
func (r *reader) readUnsupported(v strict.Value, key string) {
	if list, ok := v.Data.(strict.List); v.Data != "" && (!ok || len(list) > 0) {
		r.unserved.Note(v.Place, "unsupported: %s", key)
	}
}

// Unserved returns, for each valid resource that is not offered, the reason.
func (c *Config) Unserved() (out []strict.Problem) {
	for _, res := range c.Resources {
		for _, p := range res.Unserved {
			out = append(out, strict.Problem{Place: p.Place, Text: fmt.Sprintf("%s: resource %s is not served", p.Text, res.FullName())})
		}
	}
	return out
}
