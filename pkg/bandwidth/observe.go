// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"fmt"

	"github.com/podlace/podlace/pkg/kernel"
)

// observedLimit contains the kernel's objects of one limit.
type observedLimit struct {
	link        kernel.Link // carries the token bucket: the host side, or the ifb device
	bucket      kernel.Bucket
	lost        string // why frames pass the limit, or ""
	passesShort bool   // only frames shorter than 18 bytes pass, because the reference plugin made the redirect
}

// A bucketReader returns the token bucket of a link: kernel.NS.Shaped asks the kernel, and bucketsFrom looks in a list.
type bucketReader func(kernel.Link) (b kernel.Bucket, ok bool, err error)

// observe finds the kernel objects of a state's limits. CHECK, restore and `podlace limits` decide by its result.
func (st state) observe(host *kernel.Node, link kernel.Link, read bucketReader) (of Both[observedLimit], err error) {
	bucket := func(on kernel.Link) (observedLimit, error) {
		b, ok, err := read(on)
		e := observedLimit{link: on, bucket: b}
		if err == nil && !ok {
			e.lost = fmt.Sprintf("the token bucket of %s is missing", on.Name)
		}
		return e, err
	}
	if st.Ingress != nil {
		if of.Ingress, err = bucket(link); err != nil {
			return of, err
		}
	}
	if st.Egress == nil {
		return of, nil
	}
	ifb, _, err := ifbDevice(host, st.IFB)
	if err != nil || !ifb.Up {
		of.Egress = observedLimit{link: ifb, lost: fmt.Sprintf("device %s is missing or down", st.IFB)}
		return of, err
	}
	have, err := host.Redirected(link, ifb)
	if err == nil && have != kernel.RedirectsNone {
		of.Egress, err = bucket(ifb)
	}
	switch {
	case have == kernel.RedirectsNone:
		of.Egress = observedLimit{link: ifb, lost: fmt.Sprintf("the redirect from %s to %s is missing", link.Name, ifb.Name)}
	case have == kernel.RedirectsLong && of.Egress.lost == "":
		of.Egress.passesShort = true
		of.Egress.lost = fmt.Sprintf("the redirect from %s to %s lets frames shorter than 18 bytes pass the limit", link.Name, ifb.Name)
	}
	return of, err
}

func bucketsFrom(all map[int]kernel.Bucket) bucketReader {
	return func(link kernel.Link) (kernel.Bucket, bool, error) {
		b, ok := all[link.Index]
		return b, ok, nil
	}
}
