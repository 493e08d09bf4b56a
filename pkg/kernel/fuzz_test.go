// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/hex"
	"net"
	"testing"
)

// FuzzPrefix: Prefix returns a valid prefix or false.
func FuzzPrefix(f *testing.F) {
	f.Add([]byte{10, 1, 0, 5}, []byte{255, 255, 255, 0})
	f.Add([]byte{10, 1, 0, 5}, []byte{255, 0, 255, 0})
	f.Add([]byte(net.ParseIP("10.1.0.5")), []byte(net.CIDRMask(120, 128)))
	f.Add([]byte(net.ParseIP("10.1.0.5")), []byte(net.CIDRMask(24, 32)))
	f.Add([]byte(net.ParseIP("fd00::1")), []byte(net.CIDRMask(64, 128)))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, ip, mask []byte) {
		p, ok := Prefix(&net.IPNet{IP: ip, Mask: mask})
		if !ok {
			return
		}
		if !p.IsValid() || p.Addr().Is4In6() {
			t.Fatalf("%v/%v: %s", ip, mask, p)
		}
		if back, ok := Prefix(IPNet(p)); !ok || back != p {
			t.Fatalf("%s was converted to %s", p, back)
		}
	})
}

// FuzzParseFlow: parseFlow returns a complete UDP entry or false.
func FuzzParseFlow(f *testing.F) {
	entry, _ := hex.DecodeString("020000003400018014000180080001000a00010108000200" +
		"0a0001021c000280050001001100000006000200040000000600030000350000" +
		"3400028014000180080001000a00010208000200" + "0a0001011c000280050001001100000006000200003500000600030004000000")
	if flow, ok := parseFlow(entry); !ok || flow.To.String() != "10.0.1.2:53" || flow.Answer.String() != "10.0.1.2:53" {
		f.Errorf("%+v, %t", flow, ok)
	}
	f.Add(entry)
	f.Add(entry[:60])
	f.Add([]byte{10, 0, 0, 0, 4, 0, 1, 128})
	f.Fuzz(func(t *testing.T, message []byte) {
		if flow, ok := parseFlow(message); ok && (!flow.To.IsValid() || !flow.Answer.IsValid()) {
			t.Errorf("%x: %+v", message, flow)
		}
	})
}
