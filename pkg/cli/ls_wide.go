// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/ports"
)

// outputWide is the output format of a table with additional columns.
const outputWide = "wide"

// parse() checks and parses the flags that select attachments.
func (f *lsFlags) parse() error {
	tests := []func(*reconcile.Attachment) bool{}
	if f.ip != "" {
		ip, err := netip.ParseAddr(f.ip)
		if err != nil {
			return fmt.Errorf("--ip %q: want an address", f.ip)
		}
		tests = append(tests, func(a *reconcile.Attachment) bool { return slices.Contains(a.Addresses, ip.Unmap()) })
	}
	if f.mac != "" {
		mac, err := net.ParseMAC(f.mac)
		if err != nil {
			return fmt.Errorf("--mac %q: want a MAC such as 0a:58:0a:3a:00:07", f.mac)
		}
		tests = append(tests, func(a *reconcile.Attachment) bool { return hasMAC(a, mac) })
	}
	if f.hostPort != "" {
		port, protocol, err := parseHostPort(f.hostPort)
		if err != nil {
			return err
		}
		tests = append(tests, func(a *reconcile.Attachment) bool {
			return slices.ContainsFunc(a.HostPorts, func(p ports.Port) bool {
				return p.Port <= port && port <= p.End() && (protocol == "" || protocol == p.Protocol)
			})
		})
	}
	f.wanted = func(a *reconcile.Attachment) bool {
		return !slices.ContainsFunc(tests, func(test func(*reconcile.Attachment) bool) bool { return !test(a) })
	}
	return nil
}

func hasMAC(a *reconcile.Attachment, mac net.HardwareAddr) bool {
	return slices.ContainsFunc(a.MACs, func(text string) bool {
		own, err := net.ParseMAC(text)
		return err == nil && bytes.Equal(own, mac)
	})
}

// parseHostPort parses a port such as 8080 or 53/udp.
func parseHostPort(text string) (port uint16, protocol string, err error) {
	number, protocol, named := strings.Cut(strings.ToLower(text), "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 || named && !slices.Contains([]string{"tcp", "udp", "sctp"}, protocol) {
		return 0, "", fmt.Errorf("--hostport %q: want a port such as 8080 or 53/udp", text)
	}
	return uint16(n), protocol, nil
}

// wideTable prints a table with the recorded details of each attachment.
func wideTable(w io.Writer, list []*reconcile.Attachment, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NETWORK\tPOD\tCONTAINER\tIFNAME\tADDRESSES\tNAMESPACE\tAGE\tHOST SIDE\tHOSTPORTS\tINGRESS\tEGRESS\tVFS")
	for _, a := range list {
		host := a.HostInterface
		if a.Bridge != "" {
			host += "@" + a.Bridge
		}
		cells := append(nameCells(a.Network, a.Pod, a.ContainerID, a.IfName), dash(joined(a.Addresses)), plain(a.State),
			age(a.Since, now), dash(plain(host)), dash(hostPorts(a.HostPorts)), limit(a.IngressRate), limit(a.EgressRate),
			dash(plain(strings.Join(a.VFs, " "))))
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// hostPorts formats ports in the syntax that --hostport accepts. A port that is mapped for both IPv4 and IPv6 is printed only once.
func hostPorts(list []ports.Port) string {
	var texts []string
	for _, p := range list {
		number := fmt.Sprint(p.Port)
		if p.Last != 0 {
			number += fmt.Sprintf("-%d", p.Last)
		}
		if p.HostIP.IsValid() && !p.HostIP.IsUnspecified() {
			number = netip.AddrPortFrom(p.HostIP, p.Port).String()
		}
		texts = append(texts, number+"/"+p.Protocol)
	}
	slices.Sort(texts)
	return plain(strings.Join(slices.Compact(texts), " "))
}

func limit(rate uint64) string {
	if rate == 0 {
		return "-"
	}
	return formatRate(rate)
}

// age() formats a duration. As in kubectl, the unit is the largest unit for which the number is at least two.
func age(since, now time.Time) string {
	d := now.Sub(since)
	switch {
	case since.IsZero() || d < 0:
		return "-"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}
