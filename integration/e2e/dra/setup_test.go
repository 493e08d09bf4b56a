// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authentication "k8s.io/api/authentication/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/podlace/podlace/conf"
)

const (
	nodeName     = "node1"
	driverName   = "sriov.podlace.io"
	account      = "system:serviceaccount:podlace:sriov-device-plugin" // of the shipped manifest
	manifestFile = "../../../conf/cluster/components/dra/sriov-device-plugin-dra.yaml"
	rightsFile   = "../../../conf/cluster/base/rights.yaml" // has the Namespace
	kubeletRoot  = "/var/lib/kubelet"
	manifests    = "/run/node/manifests" // of static pods
	conflist     = "/etc/cni/net.d/10-podlace-sriov.conflist"
)

// patience is how long to wait for an event on a slow machine. It is no performance target.
const patience = 2 * time.Minute

// adminConfig returns the configuration of an administrator's client.
func adminConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(os.Getenv(dirEnv), "plane", "admin.kubeconfig"))
	if err == nil {
		config.QPS = -1
	}
	return config, err
}

// daemonKubeconfig returns the path of the daemon's kubeconfig, whose token is bound to the node.
func daemonKubeconfig() string {
	return filepath.Join(os.Getenv(dirEnv), nodeName, "daemon.kubeconfig")
}

// becomeReady waits until the node is ready.
func becomeReady() error {
	config, err := adminConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		n, err := client.CoreV1().Nodes().Get(context.Background(), nodeName, metav1.GetOptions{})
		if err == nil && len(n.Spec.Taints) == 0 && isReady(n) {
			return nil
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("node %s is not ready: %+v", nodeName, n.Status.Conditions), err)
		}
	}
}

func isReady(n *core.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == core.NodeReady {
			return c.Status == core.ConditionTrue
		}
	}
	return false
}

// grantRights creates the ServiceAccount of the shipped manifest with its rights, and a kubeconfig with its token.
func grantRights() error {
	config, err := adminConfig()
	if err != nil {
		return err
	}
	objects, err := shippedObjects()
	if err != nil {
		return err
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if o.GetKind() == "DaemonSet" || o.GetKind() == "ConfigMap" {
			continue // the tests start the daemon themselves
		}
		if _, err := resourceOf(dyn, o).Create(context.Background(), o, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	token, err := boundToken(config, nodeName)
	if err != nil {
		return err
	}
	return writeKubeconfig(daemonKubeconfig(), token)
}

// shippedObjects returns the objects of the shipped manifest, and their Namespace first.
func shippedObjects() (objects []*unstructured.Unstructured, err error) {
	for _, file := range []string{rightsFile, manifestFile} {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		all, err := decode(text)
		if err != nil {
			return nil, err
		}
		if file == rightsFile {
			all = slices.DeleteFunc(all, func(o *unstructured.Unstructured) bool { return o.GetKind() != "Namespace" })
		}
		objects = append(objects, all...)
	}
	return objects, nil
}

func decode(text []byte) (objects []*unstructured.Unstructured, err error) {
	for documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		o := &unstructured.Unstructured{}
		err := documents.Decode(&o.Object)
		switch {
		case errors.Is(err, io.EOF):
			return objects, nil
		case err != nil:
			return nil, err
		case len(o.Object) > 0:
			objects = append(objects, o)
		}
	}
}

// resourceOf returns the client for objects of the same kind as the given object.
func resourceOf(dyn dynamic.Interface, o *unstructured.Unstructured) dynamic.ResourceInterface {
	resource, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
	if o.GetNamespace() == "" {
		return dyn.Resource(resource)
	}
	return dyn.Resource(resource).Namespace(o.GetNamespace())
}

// boundToken returns a token of the daemon's ServiceAccount. The token is bound to a node.
func boundToken(config *rest.Config, node string) (string, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	n, err := client.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	_, name, _ := strings.Cut(strings.TrimPrefix(account, "system:serviceaccount:"), ":")
	seconds := int64(24 * 60 * 60)
	request, err := client.CoreV1().ServiceAccounts("podlace").CreateToken(context.Background(), name, &authentication.TokenRequest{
		Spec: authentication.TokenRequestSpec{ExpirationSeconds: &seconds,
			BoundObjectRef: &authentication.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: n.Name, UID: n.UID}}},
		metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("token of %s: %w", account, err)
	}
	return request.Status.Token, nil
}

// writeKubeconfig writes a copy of the administrator's kubeconfig that contains the given token.
func writeKubeconfig(path, token string) error {
	config, err := clientcmd.LoadFromFile(filepath.Join(os.Getenv(dirEnv), "plane", "admin.kubeconfig"))
	if err != nil {
		return err
	}
	for _, user := range config.AuthInfos {
		user.Token = token
	}
	return clientcmd.WriteToFile(*config, path)
}

func shippedConflist() string {
	text, err := conf.Conflist(filepath.Base(conflist))
	if err != nil {
		panic(err)
	}
	return strings.Replace(string(text), `["`+resource+`"]`, fmt.Sprintf("[%q, %q]", resource, slow), 1)
}

// writeConflist installs a conflist as the configuration of the node's network.
func writeConflist(text string) error {
	return errors.Join(os.WriteFile(conflist+".new", []byte(text), 0o600), os.Rename(conflist+".new", conflist))
}
