// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
)

const (
	domain = "cluster.local."
	ttl    = 5 // seconds: tests change a Service and ask again
	chain  = 8 // names of ExternalName Services followed for one question
)

// dnsZone answers questions about the names of Services and Pods, as Kubernetes' DNS specification requires.
type dnsZone struct {
	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
}

// An endpoint is one address of a Service. name is the label before the Service's in its DNS name, and empty for a cluster IP.
type endpoint struct {
	name  string
	addr  netip.Addr
	ports []port
}

type port struct {
	name, protocol string
	number         uint16
}

// answerQuestion returns the records for one question. Names outside the zone are refused, because there is no upstream server.
func (z dnsZone) answerQuestion(q dnsmessage.Question) ([]dnsmessage.Resource, dnsmessage.RCode) {
	name := strings.ToLower(q.Name.String())
	if strings.HasSuffix(name, ".in-addr.arpa.") || strings.HasSuffix(name, ".ip6.arpa.") {
		return z.answerPointer(q, name)
	}
	rest, inside := strings.CutSuffix("."+name, "."+domain)
	if !inside {
		return nil, dnsmessage.RCodeRefused
	}
	rest = strings.TrimPrefix(rest, ".")
	if pod, ok := strings.CutSuffix(rest, ".pod"); ok {
		return podRecords(q, pod)
	}
	if service, ok := strings.CutSuffix(rest, ".svc"); ok {
		return z.answerService(q, strings.Split(service, "."), chain)
	}
	return nil, dnsmessage.RCodeNameError
}

// answerService answers questions for NAME.NAMESPACE, POD.NAME.NAMESPACE and _PORT._PROTOCOL.NAME.NAMESPACE.
func (z dnsZone) answerService(q dnsmessage.Question, words []string, depth int) ([]dnsmessage.Resource, dnsmessage.RCode) {
	if len(words) < 2 {
		return nil, dnsmessage.RCodeNameError
	}
	front, name, namespace := words[:len(words)-2], words[len(words)-2], words[len(words)-1]
	s, err := z.services.Services(namespace).Get(name)
	if err != nil {
		return nil, dnsmessage.RCodeNameError
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return z.answerExternal(q, s.Spec.ExternalName, depth)
	}
	found := z.endpointsOf(s)
	switch {
	case len(front) == 2 && strings.HasPrefix(front[0], "_") && strings.HasPrefix(front[1], "_"):
		return serviceRecords(q, found, front[0][1:], front[1][1:], name+"."+namespace+".svc."+domain)
	case len(front) == 1:
		found = named(found, front[0])
		if len(found) == 0 {
			return nil, dnsmessage.RCodeNameError
		}
	case len(front) != 0:
		return nil, dnsmessage.RCodeNameError
	}
	var answers []dnsmessage.Resource
	for _, e := range found {
		answers = append(answers, addressRecord(q, e.addr)...)
	}
	return answers, dnsmessage.RCodeSuccess
}

// answerExternal returns the CNAME record of an ExternalName Service, with the target's records if it is in the zone.
func (z dnsZone) answerExternal(q dnsmessage.Question, to string, depth int) ([]dnsmessage.Resource, dnsmessage.RCode) {
	target, err := dnsmessage.NewName(strings.TrimSuffix(to, ".") + ".")
	if err != nil || depth == 0 {
		return nil, dnsmessage.RCodeServerFailure
	}
	answers := []dnsmessage.Resource{record(q, &dnsmessage.CNAMEResource{CNAME: target})}
	if service, ok := strings.CutSuffix(target.String(), ".svc."+domain); ok && q.Type != dnsmessage.TypeCNAME {
		next := q
		next.Name = target
		more, _ := z.answerService(next, strings.Split(service, "."), depth-1)
		answers = append(answers, more...)
	}
	return answers, dnsmessage.RCodeSuccess
}

// endpointsOf returns the cluster IPs of a Service. For a headless Service, endpointsOf returns the ready endpoints.
func (z dnsZone) endpointsOf(s *corev1.Service) (all []endpoint) {
	if s.Spec.ClusterIP != corev1.ClusterIPNone {
		var ports []port
		for _, p := range s.Spec.Ports {
			ports = append(ports, port{p.Name, strings.ToLower(string(p.Protocol)), uint16(p.Port)}) //nolint:gosec // the API checks the range
		}
		for _, ip := range s.Spec.ClusterIPs {
			all = append(all, endpoint{addr: parseAddr(ip), ports: ports})
		}
		return all
	}
	slices, err := z.slices.EndpointSlices(s.Namespace).List(labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: s.Name}))
	if err != nil {
		return nil
	}
	for _, slice := range slices {
		ports := slicePorts(slice)
		for _, e := range slice.Endpoints {
			if ready := e.Conditions.Ready; ready != nil && !*ready && !s.Spec.PublishNotReadyAddresses {
				continue
			}
			for _, ip := range e.Addresses {
				one := endpoint{name: dashedName(parseAddr(ip)), addr: parseAddr(ip), ports: ports}
				if e.Hostname != nil && *e.Hostname != "" {
					one.name = *e.Hostname
				}
				all = append(all, one)
			}
		}
	}
	return all
}

func slicePorts(slice *discoveryv1.EndpointSlice) (all []port) {
	for _, p := range slice.Ports {
		if p.Port == nil {
			continue
		}
		one := port{protocol: "tcp", number: uint16(*p.Port)} //nolint:gosec // the API checks the range
		if p.Name != nil {
			one.name = *p.Name
		}
		if p.Protocol != nil {
			one.protocol = strings.ToLower(string(*p.Protocol))
		}
		all = append(all, one)
	}
	return all
}

// answerPointer answers a PTR question with the Service that has the address as a cluster IP.
func (z dnsZone) answerPointer(q dnsmessage.Question, name string) ([]dnsmessage.Resource, dnsmessage.RCode) {
	services, err := z.services.List(labels.Everything())
	if err != nil {
		return nil, dnsmessage.RCodeServerFailure
	}
	for _, s := range services {
		for _, ip := range s.Spec.ClusterIPs {
			if addr := parseAddr(ip); addr.IsValid() && reverseName(addr) == name {
				target, err := dnsmessage.NewName(s.Name + "." + s.Namespace + ".svc." + domain)
				if err != nil {
					return nil, dnsmessage.RCodeServerFailure
				}
				return only(q, dnsmessage.TypePTR, &dnsmessage.PTRResource{PTR: target}), dnsmessage.RCodeSuccess
			}
		}
	}
	return nil, dnsmessage.RCodeNameError
}

func named(all []endpoint, name string) (some []endpoint) {
	for _, e := range all {
		if e.name == name {
			some = append(some, e)
		}
	}
	return some
}
