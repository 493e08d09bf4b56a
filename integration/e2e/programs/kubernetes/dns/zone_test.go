// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
)

// newZone returns a zone that has one Service of each kind in the namespace "shop".
func newZone(t *testing.T) dnsZone {
	t.Helper()
	index := func() cache.Indexer {
		return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	}
	services, endpointSlices := index(), index()
	service := func(name string, spec corev1.ServiceSpec) {
		if err := services.Add(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: spec}); err != nil {
			t.Fatal(err)
		}
	}
	ports := []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}, {Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}}
	service("web", corev1.ServiceSpec{ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7", "fd00:10:96::7"}, Ports: ports})
	service("db", corev1.ServiceSpec{ClusterIP: "None", ClusterIPs: []string{"None"}, Ports: ports[:1]})
	service("boot", corev1.ServiceSpec{ClusterIP: "None", PublishNotReadyAddresses: true})
	service("far", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "foo.example.com"})
	service("near", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "web.shop.svc.cluster.local"})
	service("loop", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "loop.shop.svc.cluster.local"})
	for i, name := range []string{"db", "boot"} {
		if err := endpointSlices.Add(&discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprint(name, i), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			Endpoints: []discoveryv1.Endpoint{
				{Addresses: []string{"10.244.1.4"}, Hostname: new("db-0")},
				{Addresses: []string{"10.244.1.5"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}},
				{Addresses: []string{"10.244.1.6"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false)}},
			},
			Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	return dnsZone{corelisters.NewServiceLister(services), discoverylisters.NewEndpointSliceLister(endpointSlices)}
}

// formatRecords formats records as a zone file does, without the name and the time to live.
func formatRecords(answers []dnsmessage.Resource) string {
	var all []string
	for _, a := range answers {
		switch body := a.Body.(type) {
		case *dnsmessage.AResource:
			all = append(all, fmt.Sprintf("A %d.%d.%d.%d", body.A[0], body.A[1], body.A[2], body.A[3]))
		case *dnsmessage.AAAAResource:
			all = append(all, fmt.Sprintf("AAAA %x", body.AAAA))
		case *dnsmessage.CNAMEResource:
			all = append(all, "CNAME "+body.CNAME.String())
		case *dnsmessage.PTRResource:
			all = append(all, "PTR "+body.PTR.String())
		case *dnsmessage.SRVResource:
			all = append(all, fmt.Sprintf("SRV %d %s", body.Port, body.Target))
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

func TestAnswer(t *testing.T) {
	z := newZone(t)
	for _, test := range []struct {
		name, kind, want string
		code             dnsmessage.RCode
	}{
		{name: "web.shop.svc.cluster.local.", kind: "A", want: "A 10.96.0.7"},
		{name: "WEB.shop.svc.cluster.local.", kind: "A", want: "A 10.96.0.7"},
		{name: "web.shop.svc.cluster.local.", kind: "AAAA", want: "AAAA fd000010009600000000000000000007"},
		{name: "web.shop.svc.cluster.local.", kind: "SRV"},
		{name: "absent.shop.svc.cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
		{name: "shop.svc.cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
		{name: "a.b.web.shop.svc.cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
		{name: "_http._tcp.web.shop.svc.cluster.local.", kind: "SRV", want: "SRV 80 web.shop.svc.cluster.local."},
		{name: "_dns._udp.web.shop.svc.cluster.local.", kind: "SRV", want: "SRV 53 web.shop.svc.cluster.local."},
		{name: "_http._udp.web.shop.svc.cluster.local.", kind: "SRV", code: dnsmessage.RCodeNameError},
		{name: "db.shop.svc.cluster.local.", kind: "A", want: "A 10.244.1.4, A 10.244.1.5"},
		{name: "db.shop.svc.cluster.local.", kind: "AAAA"},
		{name: "boot.shop.svc.cluster.local.", kind: "A", want: "A 10.244.1.4, A 10.244.1.5, A 10.244.1.6"},
		{name: "db-0.db.shop.svc.cluster.local.", kind: "A", want: "A 10.244.1.4"},
		{name: "10-244-1-5.db.shop.svc.cluster.local.", kind: "A", want: "A 10.244.1.5"},
		{name: "db-1.db.shop.svc.cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
		{
			name: "_http._tcp.db.shop.svc.cluster.local.", kind: "SRV",
			want: "SRV 8080 10-244-1-5.db.shop.svc.cluster.local., SRV 8080 db-0.db.shop.svc.cluster.local.",
		},
		{name: "far.shop.svc.cluster.local.", kind: "CNAME", want: "CNAME foo.example.com."},
		{name: "near.shop.svc.cluster.local.", kind: "A", want: "A 10.96.0.7, CNAME web.shop.svc.cluster.local."},
		{name: "7.0.96.10.in-addr.arpa.", kind: "PTR", want: "PTR web.shop.svc.cluster.local."},
		{
			name: "7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa.", kind: "PTR",
			want: "PTR web.shop.svc.cluster.local.",
		},
		{name: "8.0.96.10.in-addr.arpa.", kind: "PTR", code: dnsmessage.RCodeNameError},
		{name: "10-244-1-9.shop.pod.cluster.local.", kind: "A", want: "A 10.244.1.9"},
		{name: "fd00--9.shop.pod.cluster.local.", kind: "AAAA", want: "AAAA fd000000000000000000000000000009"},
		{name: "web.shop.pod.cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
		{name: "cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
		{name: "notcluster.local.", kind: "A", code: dnsmessage.RCodeRefused},
		{name: "example.com.", kind: "A", code: dnsmessage.RCodeRefused},
		{name: "other.cluster.local.", kind: "A", code: dnsmessage.RCodeNameError},
	} {
		t.Run(test.kind+" "+test.name, func(t *testing.T) {
			kinds := map[string]dnsmessage.Type{
				"A": dnsmessage.TypeA, "AAAA": dnsmessage.TypeAAAA, "SRV": dnsmessage.TypeSRV,
				"CNAME": dnsmessage.TypeCNAME, "PTR": dnsmessage.TypePTR,
			}
			answers, code := z.answerQuestion(dnsmessage.Question{
				Name: dnsmessage.MustNewName(test.name), Type: kinds[test.kind], Class: dnsmessage.ClassINET,
			})
			if got := formatRecords(answers); got != test.want || code != test.code {
				t.Errorf("%q, %v; want %q, %v", got, code, test.want, test.code)
			}
		})
	}
}

// TestLoop: the answer for an ExternalName Service that is an alias of itself ends after some records and fits into a packet.
func TestLoop(t *testing.T) {
	loop := dnsmessage.Question{Name: dnsmessage.MustNewName("loop.shop.svc.cluster.local."), Type: dnsmessage.TypeA}
	answers, _ := newZone(t).answerQuestion(loop)
	if len(answers) != chain {
		t.Errorf("%d records, want %d", len(answers), chain)
	}
}

// TestTruncated: an answer above the size limit has no records, but the TC (truncated) bit.
func TestTruncated(t *testing.T) {
	z := newZone(t)
	ask := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 42},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("db.shop.svc.cluster.local."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}
	query, err := ask.Pack()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		limit, answers int
		truncated      bool
	}{{maxPacket, 2, false}, {60, 0, true}} {
		var got dnsmessage.Message
		if err := got.Unpack(z.replyTo(query, test.limit)); err != nil {
			t.Fatal(err)
		}
		if got.ID != 42 || !got.Response || len(got.Answers) != test.answers || got.Truncated != test.truncated {
			t.Errorf("limit %d: %d answers, header %+v", test.limit, len(got.Answers), got.Header)
		}
	}
	if reply := z.replyTo([]byte{1, 2, 3}, maxPacket); reply != nil {
		t.Errorf("%d bytes of noise got an answer: %x", 3, reply)
	}
}
