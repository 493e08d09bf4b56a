// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"slices"

	"github.com/podlace/podlace/pkg/nft"
)

// compareElements returns the wrong and the missing elements of the sets. A wrong one, written by another program, has no owner or a value
// that does not fit its owner. The element whose place it takes counts as missing.
func compareElements(t *nft.Handle, want []nft.Element) (wrong, missing []nft.Element, err error) {
	found, err := t.Find(want)
	if err != nil {
		return nil, nil, err
	}
	for i, e := range want {
		got := found[i]
		switch {
		case got == nil:
			missing = append(missing, e)
		case e.Comment == "": // an element that all pods share
		case got.Comment == "", ownerHash(got.Comment) == ownerHash(e.Comment) && !sameValue(*got, e):
			wrong, missing = append(wrong, *got), append(missing, e)
		}
	}
	for _, set := range []string{"ports", "hostip_ports", "ranges"} {
		for _, family := range nft.Families() {
			list, err := t.List(set + family.Digit)
			if err != nil {
				return nil, nil, err
			}
			wrong = append(wrong, slices.DeleteFunc(list, func(e nft.Element) bool { return e.Comment != "" })...)
		}
	}
	return uniqueElements(wrong), missing, nil
}

func sameValue(a, b nft.Element) bool {
	return string(a.Value) == string(b.Value) && string(a.Last) == string(b.Last)
}
