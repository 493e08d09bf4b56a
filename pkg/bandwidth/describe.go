// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"fmt"

	"github.com/podlace/podlace/pkg/attachment"
)

// Rates returns the limits in a bandwidth record in bits per second, where 0 means no limit. Ingress is the traffic that the pod receives.
func Rates(rec attachment.Record) (ingress, egress uint64, err error) {
	st, err := attachment.StateOf[state](rec)
	if st.Ingress != nil {
		ingress = st.Ingress.Rate
	}
	if st.Egress != nil {
		egress = st.Egress.Rate
	}
	return ingress, egress, err
}

// Objects returns one line for each kernel object that enforces the recorded limits.
func Objects(rec attachment.Record) (lines []string, err error) {
	st, err := attachment.StateOf[state](rec)
	if st.Ingress != nil {
		lines = append(lines, fmt.Sprintf("qdisc tbf of %s: ingress limit of %d bit/s, burst %d bytes", st.Link, st.Ingress.Rate,
			st.Ingress.Burst))
	}
	if st.Egress != nil {
		lines = append(lines, fmt.Sprintf("filter of %s: redirect of ingress to ifb link %s", st.Link, st.IFB),
			fmt.Sprintf("qdisc tbf of %s: egress limit of %d bit/s, burst %d bytes", st.IFB, st.Egress.Rate, st.Egress.Burst))
	}
	return lines, err
}
